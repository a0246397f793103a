"""Offloads saved activations to pinned host memory or, if the device itself is the host, to a file
on disk.

The tensors that a block saves for its backward pass are written to the store when its forward pass ends, and read back when
its backward pass begins. On CUDA the copies overlap with computation: while one block runs backward, the saved tensors of
the next block of the backward pass are read.

With checkpointing a block saves only its input. Without, it also saves 16-bit copies of its weights, which are moved too.
Weights themselves and tensors that all blocks share, such as masks, are not moved.
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

    def read(self, handle: Any) -> Tensor:
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
    weights = {_storage_id(t) for t in (*module.parameters(), *module.buffers())}
    chain = _Chain(store(device, directory), weights)
    for block in module.layers:
        block.forward = _offloading(block.forward, chain, block is module.layers[-1])


def store(device: torch.device, directory: Path | None) -> Store:
    """The store for activations of `device`."""
    return Pinned(device) if device.type == "cuda" else Disk(device, directory)


def _offloading(forward: Callable[..., Any], chain: _Chain, last: bool) -> Callable[..., Any]:
    """`forward` of a block, the `last` one or another, which offloads what it saves."""

    def run(x: Tensor, *shared: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *shared)
        block = _BlockTensors(chain, {_storage_id(t) for t in _tensors(shared)})
        with torch.autograd.graph.saved_tensors_hooks(block.pack, block.unpack):
            y = forward(x, *shared)
        block.close()
        if last:
            chain.free()
        return y

    return run


class _Chain:
    """What the blocks of one forward pass have saved, until each one's backward pass."""

    def __init__(self, store: Store, weights: set[int]) -> None:
        self.store, self.weights = store, weights
        self.offloaded: list[_BlockTensors] = []
        """The blocks whose tensors are in the store, in the order of the forward pass."""
        self.being_written: list[Tensor] = []
        """The tensors of the block that ran last, whose writes may not have ended."""

    def free(self) -> None:
        """Free the tensors that are being written, once that is done."""
        if self.being_written:
            self.store.written()
            self.being_written.clear()

    def fetch(self, block: _BlockTensors) -> None:
        """Read a block's tensors back, and start reading those of the next block in the backward
        pass."""
        block.read()
        self.offloaded.remove(block)
        self.store.wait()
        if not self.offloaded:
            self.store.clear()
        elif self.store.ahead:
            self.offloaded[-1].read()


class _Saved:
    """One storage that a block saved."""

    __slots__ = ("handle", "tensor", "uses")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        """The storage as a flat tensor; None while it is in the store only."""
        self.handle: Any = None
        """What the store's `read` takes."""
        self.uses = 0
        """How many saved tensors in this storage the backward pass has not read yet."""


class _BlockTensors:
    """What one block saved in one forward pass. `shared`: storages of tensors that other blocks use too."""

    def __init__(self, chain: _Chain, shared: set[int]) -> None:
        self._chain = chain
        self._not_moved = chain.weights | shared
        self._saved: dict[int, _Saved] = {}
        self._read = False

    def pack(self, tensor: Tensor) -> Any:
        """Autograd's hook for a tensor that is saved: what it keeps in its place. See `unpack`."""
        storage, size = _storage_id(tensor), tensor.untyped_storage().nbytes()
        if storage in self._not_moved or size < SMALLEST_BYTES:
            return tensor
        saved = self._saved.get(storage)
        if saved is None:
            flat = tensor.as_strided((size // tensor.element_size(),), (1,), 0)
            saved = self._saved[storage] = _Saved(flat)
        saved.uses += 1
        return saved, tensor.shape, tensor.stride(), tensor.storage_offset()

    def close(self) -> None:
        """Write all saved tensors out. They are freed when that is done and the next block has run, so
        that the device has those of two blocks at most."""
        chain = self._chain
        chain.free()
        for saved in self._saved.values():
            assert saved.tensor is not None
            saved.handle = chain.store.write(saved.tensor)
            if chain.store.ahead:
                chain.being_written.append(saved.tensor)
            saved.tensor = None
        if self._saved:
            chain.offloaded.append(self)

    def read(self) -> None:
        """Start reading all saved tensors back to the device."""
        if not self._read:
            self._read = True
            for saved in self._saved.values():
                saved.tensor = self._chain.store.read(saved.handle)
                saved.handle = None

    def unpack(self, packed: Any) -> Tensor:
        """Autograd's hook for a saved tensor that the backward pass reads. The first one brings back all of the block's."""
        if isinstance(packed, Tensor):
            return packed
        saved, shape, stride, offset = packed
        if self in self._chain.offloaded:
            self._chain.fetch(self)
        tensor = saved.tensor.as_strided(shape, stride, offset)
        saved.uses -= 1
        if not saved.uses:
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
        data = memoryview(tensor.view(torch.uint8).cpu().numpy())
        start, done = self._end, 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], start + done)
        self._end += len(data)
        return start, tensor.shape, tensor.dtype

    def read(self, handle: Any) -> Tensor:
        start, shape, dtype = handle
        tensor = torch.empty(shape, dtype=dtype)
        data, done = memoryview(tensor.view(torch.uint8).numpy()), 0
        while done < len(data):
            count = os.preadv(self._file.fileno(), [data[done:]], start + done)
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

    def read(self, handle: Any) -> Tensor:
        tensor = torch.empty(handle.shape, dtype=handle.dtype, device=self._device)
        self._in.wait_stream(torch.cuda.current_stream())  # it may still use the reused memory
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            tensor.copy_(handle, non_blocking=True)
        return tensor

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._in)

    def written(self) -> None:
        torch.cuda.current_stream().wait_stream(self._out)

    def clear(self) -> None:
        pass


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
