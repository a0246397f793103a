"""Frees the device memory of weights, optimizer state or gradients, and restores them later."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from memconsole_torch.techniques.optimizer import blocks
from memconsole_trainer.engine import Part, ReleaseMode


class HostCopy:
    """A tensor whose storage is copied to the host and freed on the device."""

    def __init__(self, tensor: Tensor, *, pinned: bool) -> None:
        self._tensor, storage = tensor, tensor.untyped_storage()
        host = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        self._host = host.pin_memory() if pinned and storage.device.type == "cuda" else host
        storage.resize_(0)

    def values(self, tensor: Tensor) -> Tensor:
        """The values of `tensor`, which shares this storage, on the host."""
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(self._host, tensor.storage_offset(), tensor.size(), tensor.stride())

    def allocate(self) -> None:
        """Allocate the storage on the device again."""
        self._tensor.untyped_storage().resize_(self._host.nbytes())

    def fill(self) -> None:
        """Copy the values back."""
        storage = self._tensor.untyped_storage()
        storage.copy_(self._host, non_blocking=self._host.is_pinned())


class QuantizedCopy:
    """A tensor of which only 8-bit codes are kept, or nothing; without codes it is restored as zeros."""

    def __init__(self, tensor: Tensor, codes: blocks.Codes | None) -> None:
        self._tensor, self._codes, self._shape = tensor, codes, tensor.shape
        tensor.data = tensor.new_empty(0)

    def values(self, tensor: Tensor) -> Tensor:
        """The values with which the tensor will be restored."""
        if self._codes is None:
            return tensor.new_zeros(self._shape)
        return blocks.decode(self._codes, tensor.new_empty(self._shape))

    def allocate(self) -> None:
        """Allocate the tensor again."""
        self._tensor.data = self._tensor.new_empty(self._shape)

    def fill(self) -> None:
        """Give the tensor its values."""
        if self._codes is None:
            self._tensor.zero_()
        else:
            blocks.decode(self._codes, self._tensor)


class Releaser:
    """Releases and restores parts of an engine. Tensors stay the same objects, so references to them stay valid.

    `tensors` returns the tensors of a part. If the device's memory is the host's (not `moves`), nothing
    is copied to the host. Tensors that are not on the device stay where they are; with the mode
    `reinitialize` they are filled with zeros. `signed` says whether a tensor's values have both signs,
    which decides the map of their 8-bit codes.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: Callable[[Part], Iterable[Tensor]],
        *,
        moves: bool,
        signed: Callable[[Tensor], bool] = lambda tensor: True,
    ) -> None:
        self._device, self._tensors, self._moves, self._signed = device, tensors, moves, signed
        self._copies: dict[Part, dict[int, HostCopy | QuantizedCopy]] = {}
        """The copies of each released part: a `HostCopy` by the address of its storage, a `QuantizedCopy` by the id of its
        tensor."""
        self._fetched: dict[Part, torch.cuda.Event | None] = {}
        """The parts that are being copied back, each with the event at the end of its copies."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def release(self, part: Part, mode: ReleaseMode = "cpu") -> None:
        """Free the device memory of `part`. Does nothing if it is released already."""
        if part in self._copies:
            return
        copies = self._copies[part] = {}
        quantizes = mode in ("compress", "reinitialize")
        for tensor in self._tensors(part) if self._moves or quantizes else ():
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            if storage.device.type != self._device.type:
                if mode == "reinitialize":
                    tensor.zero_()
                continue
            if quantizes:
                signed = self._signed(tensor)
                codes = blocks.encode(tensor, signed=signed) if mode == "compress" else None
                copies[id(tensor)] = QuantizedCopy(tensor, codes)
            else:
                copies[storage._cdata] = HostCopy(tensor, pinned=mode == "pinned")

    def fetch(self, part: Part) -> None:
        """Begin to copy `part` back; on CUDA the copies overlap with work that is queued meanwhile.
        `restore` waits for them. Does nothing if the part is not released, or is fetched already."""
        if part not in self._copies or part in self._fetched:
            return
        self._allocate(part)
        if self._stream is None:
            self._fill(part)
            self._fetched[part] = None
            return
        # The memory is allocated on the current stream, which may reuse it later.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._fill(part)
        self._fetched[part] = self._stream.record_event()

    def restore(self, part: Part) -> None:
        """Restore `part`. Does nothing if it is not released."""
        if part not in self._copies:
            return
        if part in self._fetched:
            event = self._fetched.pop(part)
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
        else:
            self._allocate(part)
            self._fill(part)
        del self._copies[part]

    def _allocate(self, part: Part) -> None:
        for copy in self._copies[part].values():
            copy.allocate()

    def _fill(self, part: Part) -> None:
        for copy in self._copies[part].values():
            copy.fill()

    def discard(self, part: Part) -> None:
        """Drop the copies of a released `part`, which will not be restored."""
        self._copies.pop(part, None)
        self._fetched.pop(part, None)

    def require(self, *parts: Part) -> None:
        """Raise `RuntimeError` if one of `parts` is released."""
        for part in parts:
            if part in self._copies:
                raise RuntimeError(f"{part} of the model are released: restore them first")

    def values(self, tensor: Tensor) -> Tensor:
        """`tensor`, or its values on the host if it is released."""
        for copies in self._copies.values():
            copy = copies.get(id(tensor)) or copies.get(tensor.untyped_storage()._cdata)
            if copy is not None:
                return copy.values(tensor)
        return tensor
