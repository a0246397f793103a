"""Frees the device memory of weights, optimizer state or gradients, and fills it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from memconsole_torch.techniques.optimizer import blocks
from memconsole_trainer.engine import Keeping, Part


class Moved:
    """A tensor whose storage waits on the host."""

    def __init__(self, tensor: Tensor, *, pinned: bool) -> None:
        self._tensor, storage = tensor, tensor.untyped_storage()
        host = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        self._host = host.pin_memory() if pinned and storage.device.type == "cuda" else host
        storage.resize_(0)

    def shown(self, tensor: Tensor) -> Tensor:
        """The values of `tensor`, which is in this storage."""
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(self._host, tensor.storage_offset(), tensor.size(), tensor.stride())

    def allocate(self) -> None:
        """Give the storage its memory."""
        self._tensor.untyped_storage().resize_(self._host.nbytes())

    def fill(self) -> None:
        """Bring the values back."""
        storage = self._tensor.untyped_storage()
        storage.copy_(self._host, non_blocking=self._host.is_pinned())


class Coded:
    """A tensor that is kept as 8-bit codes, or not at all; then it comes back as zeros."""

    def __init__(self, tensor: Tensor, codes: blocks.Codes | None) -> None:
        self._tensor, self._codes, self._shape = tensor, codes, tensor.shape
        tensor.data = tensor.new_empty(0)

    def shown(self, tensor: Tensor) -> Tensor:
        """The values that the tensor will have."""
        if self._codes is None:
            return tensor.new_zeros(self._shape)
        return blocks.decode(self._codes, tensor.new_empty(self._shape))

    def allocate(self) -> None:
        """Give the tensor its memory."""
        self._tensor.data = self._tensor.new_empty(self._shape)

    def fill(self) -> None:
        """Give the tensor its values."""
        if self._codes is None:
            self._tensor.zero_()
        else:
            blocks.decode(self._codes, self._tensor)


class Held:
    """Releases and restores parts. The tensors stay the same objects, so references to them stay valid.

    `tensors` returns the tensors of a part. If the device's memory is the host's (not `moves`), nothing
    is moved to the host. Tensors that are not on the device stay where they are; with the keeping
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
        self._away: dict[Part, dict[int, Moved | Coded]] = {}
        """The released tensors of each part, by the index of the storage, or of the tensor if it is coded."""
        self._coming: dict[Part, torch.cuda.Event | None] = {}
        """Parts that are on their way back, and the end of their copies."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def release(self, part: Part, keeping: Keeping = "cpu") -> None:
        """Free the storages of `part`. Does nothing if they are free already."""
        if part in self._away:
            return
        kept = self._away[part] = {}
        coded = keeping in ("compress", "reinitialize")
        for tensor in self._tensors(part) if self._moves or coded else ():
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            if storage.device.type != self._device.type:
                if keeping == "reinitialize":
                    tensor.zero_()
                continue
            if coded:
                signed = self._signed(tensor)
                codes = blocks.encode(tensor, signed=signed) if keeping == "compress" else None
                kept[id(tensor)] = Coded(tensor, codes)
            else:
                kept[storage._cdata] = Moved(tensor, pinned=keeping == "pinned")

    def fetch(self, part: Part) -> None:
        """Begin to bring `part` back; on CUDA the copies overlap with work that is queued meanwhile.
        `restore` waits for them. Does nothing if the part was not released, or was fetched already."""
        if part not in self._away or part in self._coming:
            return
        self._allocate(part)
        if self._stream is None:
            self._fill(part)
            self._coming[part] = None
            return
        # Allocate on the usual stream, which may reuse the memory later.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._fill(part)
        self._coming[part] = self._stream.record_event()

    def restore(self, part: Part) -> None:
        """Bring `part` back. Does nothing if it was not released."""
        if part not in self._away:
            return
        if part in self._coming:
            event = self._coming.pop(part)
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
        else:
            self._allocate(part)
            self._fill(part)
        del self._away[part]

    def _allocate(self, part: Part) -> None:
        for kept in self._away[part].values():
            kept.allocate()

    def _fill(self, part: Part) -> None:
        for kept in self._away[part].values():
            kept.fill()

    def forget(self, part: Part) -> None:
        """Discard a released `part`, which will not be restored."""
        self._away.pop(part, None)
        self._coming.pop(part, None)

    def need(self, *parts: Part) -> None:
        """Raise `RuntimeError` if one of `parts` is released."""
        for part in parts:
            if part in self._away:
                raise RuntimeError(f"{part} of the model are released: restore them first")

    def shown(self, tensor: Tensor) -> Tensor:
        """`tensor`, or its values on the host if it is released."""
        for away in self._away.values():
            kept = away.get(id(tensor)) or away.get(tensor.untyped_storage()._cdata)
            if kept is not None:
                return kept.shown(tensor)
        return tensor
