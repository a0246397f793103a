"""Live tensor bytes of a PyTorch computation, event by event, without a GPU: the truth the formulas answer to.

A dispatch mode sees every operator. Each storage counts from the operator that first shows it until its
last reference dies, which is what a caching allocator would call allocated. Works on real and on fake tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES_INPUT = {torch.ops.aten.logsumexp.default}
"""Operators whose kernel holds a copy of its input that no dispatch shows (their resident memory was measured)."""


class Liveness(TorchDispatchMode):  # type: ignore[misc]
    """Counts live storage bytes while active; `peaks` holds the highest count of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.phase = "build"
        self.peaks: dict[str, int] = {}
        self.at_peak: dict[str, str] = {}
        """The operator at which each phase's peak was reached."""
        self._seen: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        unseen = args[0].nbytes if func in COPIES_INPUT else 0
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        if self.live + unseen > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = self.live + unseen
            self.at_peak[self.phase] = str(func)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage unless it already is."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self.live += size
        self._seen[key] = weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self.live -= size

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count peaks under another phase's name; the live bytes at its start count too."""
        before, self.phase = self.phase, phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.live)
        try:
            yield
        finally:
            self.phase = before
