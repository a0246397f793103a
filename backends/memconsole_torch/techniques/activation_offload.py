"""Saved activations off the device: in pinned host memory, or, where that is the device's own memory, in a file on disk.

What a block saves for its backward pass is written out when the block has run, and read back whole when its
backward pass begins; on CUDA beside the computation, the block below meanwhile. With checkpointing only the
blocks' inputs move. Weights and what all blocks share stay.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

SMALLEST_BYTES = 1024
"""Smaller tensors stay."""


class Store(Protocol):
    """Where activations wait."""

    ahead: bool
    """Whether reading runs beside the computation, so that the next block's is worth beginning early."""

    def write(self, tensor: Tensor) -> Any:
        """Keep a flat tensor; returns what `read` wants."""
        ...

    def read(self, kept: Any) -> Tensor:
        """The tensor again, on its device."""
        ...

    def wait(self) -> None:
        """What was read so far may be computed with from now on."""
        ...

    def clear(self) -> None:
        """Nothing that was written is wanted any more."""
        ...


def apply(module: nn.Module, directory: Path | None) -> None:
    """Move what the blocks of `module` save; a file of it has no name and goes with the process.

    Applied behind checkpointing, whose inputs it then sees.
    """
    device = next(module.parameters()).device
    weights = {_place(t) for t in (*module.parameters(), *module.buffers())}
    chain = _Chain(store(device, directory), weights)
    for block in module.layers:
        block.forward = _moving(block.forward, chain)


def store(device: torch.device, directory: Path | None) -> Store:
    """The store for activations of `device`."""
    return Pinned(device) if device.type == "cuda" else Disk(device, directory)


def _moving(forward: Callable[..., Any], chain: _Chain) -> Callable[..., Any]:
    def run(x: Tensor, *shared: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *shared)
        block = _Block(chain, {_place(t) for t in _tensors(shared)})
        with torch.autograd.graph.saved_tensors_hooks(block.pack, block.unpack):
            y = forward(x, *shared)
        block.close()
        return y

    return run


class _Chain:
    """The blocks of one forward pass whose backward pass is still to come."""

    def __init__(self, where: Store, weights: set[int]) -> None:
        self.store, self.weights = where, weights
        self.waiting: list[_Block] = []

    def fetch(self, block: _Block) -> None:
        """Read a block's tensors back, and begin with the block below."""
        block.read()
        self.waiting.remove(block)
        self.store.wait()
        if not self.waiting:
            self.store.clear()
        elif self.store.ahead:
            self.waiting[-1].read()


class _Saved:
    """One storage that a block saved, under how many names it is still wanted."""

    __slots__ = ("kept", "tensor", "wanted")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.kept: Any = None
        self.wanted = 0


class _Block:
    """What one block saved in one forward pass."""

    def __init__(self, chain: _Chain, shared: set[int]) -> None:
        self._chain = chain
        self._stays = chain.weights | shared
        self._saved: dict[int, _Saved] = {}
        self._read = False

    def pack(self, tensor: Tensor) -> Any:
        place, size = _place(tensor), tensor.untyped_storage().nbytes()
        if place in self._stays or size < SMALLEST_BYTES:
            return tensor
        saved = self._saved.get(place)
        if saved is None:
            flat = tensor.as_strided((size // tensor.element_size(),), (1,), 0)
            saved = self._saved[place] = _Saved(flat)
        saved.wanted += 1
        return saved, tensor.shape, tensor.stride(), tensor.storage_offset()

    def close(self) -> None:
        """Write all of it out, and let go of it."""
        for saved in self._saved.values():
            assert saved.tensor is not None
            saved.kept = self._chain.store.write(saved.tensor)
            saved.tensor = None
        if self._saved:
            self._chain.waiting.append(self)

    def read(self) -> None:
        """Have all of it on the device again, or on its way."""
        if not self._read:
            self._read = True
            for saved in self._saved.values():
                saved.tensor = self._chain.store.read(saved.kept)
                saved.kept = None

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved, shape, stride, offset = packed
        if self in self._chain.waiting:
            self._chain.fetch(self)
        tensor = saved.tensor.as_strided(shape, stride, offset)
        saved.wanted -= 1
        if not saved.wanted:
            saved.tensor = None
        return tensor


class Disk:
    """A file without a name, of one micro-batch's activations: the kernel writes it back when memory is short.

    A CPU's tensors are written from where they lie and read into place; another device's pass through the host, one at
    a time.
    """

    ahead = False

    def __init__(self, device: torch.device, directory: Path | None) -> None:
        self._device = device
        self._file = tempfile.TemporaryFile(dir=directory, prefix="activations-", buffering=0)  # noqa: SIM115
        self._end = 0

    def write(self, tensor: Tensor) -> Any:
        """Raises OSError where the disk is full."""
        view = memoryview(tensor.view(torch.uint8).cpu().numpy())
        start, done = self._end, 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], start + done)
        self._end += len(view)
        return start, tensor.shape, tensor.dtype

    def read(self, kept: Any) -> Tensor:
        start, shape, dtype = kept
        tensor = torch.empty(shape, dtype=dtype)
        view, done = memoryview(tensor.view(torch.uint8).numpy()), 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if not count:
                raise OSError(f"activations on disk end at {start + done} bytes")
            done += count
        return tensor.to(self._device)

    def wait(self) -> None:
        pass

    def clear(self) -> None:
        self._end = 0
        self._file.truncate(0)


class Pinned:
    """Host memory that the device copies to and from on streams of its own."""

    ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def write(self, tensor: Tensor) -> Any:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._out)
        return host

    def read(self, kept: Any) -> Tensor:
        here = torch.empty(kept.shape, dtype=kept.dtype, device=self._device)
        self._in.wait_stream(torch.cuda.current_stream())  # whose memory this may have been
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            here.copy_(kept, non_blocking=True)
        here.record_stream(self._in)
        return here

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._in)

    def clear(self) -> None:
        pass


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
