"""Offloads saved activations to pinned host memory or, if the device itself is the host, to a file
on disk.

The tensors that a block saves for its backward pass are written out when its forward pass ends, and
read back when its backward pass begins. On CUDA the copies overlap with computation: while one block
runs backward, the saved tensors of the block that follows it in the backward pass are read. With
checkpointing only the blocks' inputs are moved. Weights and tensors that all blocks share are not
moved; without checkpointing, 16-bit copies of weights are.
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
"""Smaller tensors are not moved."""


class Store(Protocol):
    """A place for offloaded activations."""

    ahead: bool
    """Whether reads and writes overlap with computation, so that starting the next block's read early
    helps, and a block's tensors must live until they are written."""

    def write(self, tensor: Tensor) -> Any:
        """Store a flat tensor. Returns a handle for `read`."""
        ...

    def read(self, kept: Any) -> Tensor:
        """Return the stored tensor on its device."""
        ...

    def wait(self) -> None:
        """Make later computation wait for the reads so far."""
        ...

    def written(self) -> None:
        """Make later computation, which may reuse the memory of what was written, wait for the writes
        so far."""
        ...

    def clear(self) -> None:
        """Discard everything that was written."""
        ...


def apply(module: nn.Module, directory: Path | None) -> None:
    """Offload what the blocks of `module` save. The file, if any, has no name and disappears with
    the process.

    Apply after checkpointing, so that only the blocks' inputs are moved.
    """
    device = next(module.parameters()).device
    weights = {_place(t) for t in (*module.parameters(), *module.buffers())}
    chain = _Chain(store(device, directory), weights)
    for block in module.layers:
        block.forward = _moving(block.forward, chain, block is module.layers[-1])


def store(device: torch.device, directory: Path | None) -> Store:
    """The store for activations of `device`."""
    return Pinned(device) if device.type == "cuda" else Disk(device, directory)


def _moving(forward: Callable[..., Any], chain: _Chain, last: bool) -> Callable[..., Any]:
    def run(x: Tensor, *shared: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *shared)
        block = _Block(chain, {_place(t) for t in _tensors(shared)})
        with torch.autograd.graph.saved_tensors_hooks(block.pack, block.unpack):
            y = forward(x, *shared)
        block.close()
        if last:
            chain.free()
        return y

    return run


class _Chain:
    """The blocks of one forward pass whose backward pass has not run yet."""

    def __init__(self, where: Store, weights: set[int]) -> None:
        self.store, self.weights = where, weights
        self.waiting: list[_Block] = []
        self.leaving: list[Tensor] = []
        """The tensors of the last block, whose writes may not have ended."""

    def free(self) -> None:
        """Free the tensors that are being written, once that is done."""
        if self.leaving:
            self.store.written()
            self.leaving.clear()

    def fetch(self, block: _Block) -> None:
        """Read a block's tensors back, and start reading those of the next block in the backward
        pass."""
        block.read()
        self.waiting.remove(block)
        self.store.wait()
        if not self.waiting:
            self.store.clear()
        elif self.store.ahead:
            self.waiting[-1].read()


class _Saved:
    """One storage that a block saved, and how many saved tensors still refer to it."""

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
        """Write all saved tensors out. They are freed when that is done and the next block has run, so
        that the device has those of two blocks at most."""
        chain = self._chain
        chain.free()
        for saved in self._saved.values():
            assert saved.tensor is not None
            saved.kept = chain.store.write(saved.tensor)
            if chain.store.ahead:
                chain.leaving.append(saved.tensor)
            saved.tensor = None
        if self._saved:
            chain.waiting.append(self)

    def read(self) -> None:
        """Start reading all saved tensors back to the device."""
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
    """An unnamed file that holds one micro-batch's activations. The kernel writes it to disk when
    memory is short.

    On a CPU, tensors are written and read without a copy; tensors of other devices pass through the
    host one at a time.
    """

    ahead = False

    def __init__(self, device: torch.device, directory: Path | None) -> None:
        self._device = device
        self._file = tempfile.TemporaryFile(dir=directory, prefix="activations-", buffering=0)  # noqa: SIM115
        self._end = 0

    def write(self, tensor: Tensor) -> Any:
        """Raises OSError if the disk is full."""
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

    def written(self) -> None:
        pass

    def clear(self) -> None:
        self._end = 0
        self._file.truncate(0)


class Pinned:
    """Pinned host memory, copied to and from the device on separate streams.

    Memory is allocated and freed in the order of the computing stream, which waits for a copy before
    its memory is used or freed. (With `record_stream` the allocator could reuse memory only after the
    device has caught up with the host, and would need more of it.)
    """

    ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def write(self, tensor: Tensor) -> Any:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
        return host

    def read(self, kept: Any) -> Tensor:
        here = torch.empty(kept.shape, dtype=kept.dtype, device=self._device)
        self._in.wait_stream(torch.cuda.current_stream())  # it may still use the reused memory
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            here.copy_(kept, non_blocking=True)
        return here

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._in)

    def written(self) -> None:
        torch.cuda.current_stream().wait_stream(self._out)

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
