"""Moves weights, optimizer state or gradients from the device to the host and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from memconsole_torch.techniques.optimizers import Updating
from memconsole_trainer.engine import Part


class Held:
    """Frees the storages of a part's tensors and fills them again. The tensor objects stay the
    same, so references to them remain valid."""

    def __init__(self, module: nn.Module, optimizer: Updating) -> None:
        self._module, self._optimizer = module, optimizer
        self._away: dict[Part, list[tuple[torch.UntypedStorage, torch.UntypedStorage]]] = {}

    def release(self, part: Part) -> None:
        """Move the storages of `part` to the host. Does nothing if they are there already."""
        if part in self._away:
            return
        found = {
            s.data_ptr(): s for t in self._tensors(part) if (s := t.untyped_storage()).nbytes()
        }
        self._away[part] = []
        for storage in found.values():
            self._away[part].append((storage, storage.cpu().clone()))
            storage.resize_(0)

    def restore(self, part: Part) -> None:
        """Bring `part` back to the device, bit for bit. Does nothing if it was not released."""
        for storage, kept in self._away.pop(part, []):
            storage.resize_(kept.nbytes())
            storage.copy_(kept)

    def _tensors(self, part: Part) -> Iterator[Tensor]:
        if part == "weights":
            yield from self._module.parameters()
            yield from self._module.buffers()
        elif part == "gradients":
            yield from (p.grad for p in self._module.parameters() if p.grad is not None)
        else:
            for state in self._optimizer.state.values():
                yield from (v for v in state.values() if isinstance(v, Tensor) and v.dim())
