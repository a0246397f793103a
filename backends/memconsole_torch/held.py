"""Moves weights, optimizer state or gradients from the device to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from memconsole_trainer.engine import Part


class Held:
    """Frees the memory of a part and fills it again. The tensors stay the same objects, so that whoever refers to
    them need not know.

    `tensors` gives those of a part. Nothing `moves` where the device's memory is the host's, and tensors that are not
    on the device stay where they are.
    """

    def __init__(
        self, device: torch.device, tensors: Callable[[Part], Iterable[Tensor]], *, moves: bool
    ) -> None:
        self._device, self._tensors, self._moves = device, tensors, moves
        self._away: dict[Part, list[torch.UntypedStorage]] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        """What released storages hold, by their place."""

    def release(self, part: Part) -> None:
        """Move the storages of `part` to the host. Does nothing if they are there already."""
        if part in self._away:
            return
        self._away[part] = []
        for tensor in self._tensors(part) if self._moves else ():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.device.type == self._device.type:
                self._kept[storage._cdata] = _on_host(storage)
                self._away[part].append(storage)
                storage.resize_(0)

    def restore(self, part: Part) -> None:
        """Bring `part` back, bit for bit. Nothing happens where it was not released."""
        for storage in self._away.pop(part, []):
            kept = self._kept.pop(storage._cdata)
            storage.resize_(kept.nbytes())
            storage.copy_(kept)

    def forget(self, part: Part) -> None:
        """Let go of a released `part` for good."""
        for storage in self._away.pop(part, []):
            del self._kept[storage._cdata]

    def need(self, *parts: Part) -> None:
        """Raise `RuntimeError` where one of `parts` is released."""
        for part in parts:
            if part in self._away:
                raise RuntimeError(f"{part} of the model are released: restore them first")

    def shown(self, tensor: Tensor) -> Tensor:
        """`tensor`, or its values on the host where it is released."""
        kept = self._kept.get(tensor.untyped_storage()._cdata)
        if kept is None:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(kept, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage.clone() if storage.device.type == "cpu" else storage.cpu()
