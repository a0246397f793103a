"""Live tensor bytes of a PyTorch computation, event by event, without a GPU.

A dispatch mode sees every operator. Each storage counts from the first operator that uses it until its last reference
is gone; a caching allocator calls these bytes allocated. This works on real and on fake tensors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memconsole_torch.tracing import trace_sums

aten = torch.ops.aten
COPIES_INPUT = frozenset({aten.logsumexp.default})
"""Operators whose kernel copies its input without a dispatch (found by measuring resident memory)."""
_WITHOUT_TENSORS = frozenset(
    {torch.ops.prim.device.default, aten.sym_size.default, aten.sym_stride.default}
)
"""Operators that return no tensors and can be ignored."""
Workspace = Callable[..., list[int]]
"""Given an operator's arguments, returns the bytes that its kernel allocates in addition to the outputs."""
Override = Callable[..., Any]
"""Replaces an operator: takes its arguments and returns its results."""


class Storage:
    """One allocation: its bytes, and what is known about its origin."""

    __slots__ = ("component", "copy_of", "nbytes", "phase", "recomputed", "wide", "within")

    def __init__(self, nbytes: int, phase: str, within: str | None) -> None:
        self.nbytes = nbytes
        self.phase = phase
        self.within = within
        """The component of the part of the step that allocated it."""
        self.component: str | None = None
        """Its declared component, by its name in `table.COMPONENTS`."""
        self.copy_of: Storage | None = None
        """The storage of which it is a copy in another type."""
        self.recomputed = False
        """Whether it was allocated by the recomputation of a checkpointed block, in the backward pass."""
        self.wide = False
        """Whether its rows have the vocabulary's width."""


class Liveness(TorchDispatchMode):
    """Counts live storage bytes while active and records each allocation and release.

    `peaks` holds the highest count of each phase; `events` the index of each storage in `storages` plus
    one when it is allocated, the same negative when it is released, and a name when a phase begins.
    """

    def __init__(
        self,
        *,
        internal: bool = True,
        vocabulary: int = 0,
        overrides: dict[Any, Override] | None = None,
        workspaces: dict[Any, Workspace] | None = None,
        check: Callable[[], None] | None = None,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        """`internal`: also count what kernels allocate internally, and add up gradients in place as autograd does if
        no mode is active. `vocabulary`: identifies gradients of logits.
        `check`: called before each operator; may raise. `run`: returns an operator's results instead of running it."""
        super().__init__()
        self.live = 0
        self.peaks: dict[str, int] = {}
        self.at_peak: dict[str, str] = {}
        """The operator at which each phase's peak was reached."""
        self.storages: list[Storage] = []
        self.events: list[int | str] = []
        self.steps: list[tuple[int, int]] = []
        """Where in `events` each training step begins and ends."""
        self.within: str | None = None
        """The component of the results of the current computation."""
        self._phase = "build"
        self._internal = internal
        trace_sums.sole_references()  # measured now, before any mode is active
        self._vocabulary = vocabulary
        self._overrides = overrides or {}
        self._workspaces = workspaces or {}
        self._check = check
        self._run = run
        self._records: dict[int, tuple[weakref.finalize[Any, Any], Storage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled here, and asking Dynamo at each operator would dominate the run time."""
        return False

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        if name != self._phase:
            self._phase = name
            self.events.append(name)
            self.peaks[name] = max(self.peaks.get(name, 0), self.live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._check is not None:
            self._check()
        if DTensor in types:  # it calls operators on its local part, which are seen then
            return NotImplemented
        if self._internal and trace_sums.in_place(func, args, sys._getframe(1)):
            return args[0]
        override = self._overrides.get(func)
        if override is not None:
            result = override(*args, **(kwargs or {}))
        elif self._run is not None:
            result = self._run(func, args, kwargs or {})
            if func in _WITHOUT_TENSORS:
                return result
        else:
            result = func(*args, **(kwargs or {}))
        internal = self._internal_bytes(func, args) if self._internal else []
        for tensor in _tensors((*args, *kwargs.values()) if kwargs else args):
            self.count(tensor)
        for tensor in _tensors((result,)):
            made = self.count(tensor)
            if made is not None:
                self._describe(made, func, args, tensor)
        if internal:
            self._record_temporaries(internal)
        total = self.live + sum(internal)
        if total > self.peaks.get(self._phase, 0):
            self.peaks[self._phase] = total
            self.at_peak[self._phase] = str(func)
        return result

    def count(self, tensor: torch.Tensor) -> Storage | None:
        """Count a tensor's storage unless it is already counted. Returns the storage if it is new."""
        if tensor.device.type == "meta":
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._records:
            return None
        record = self._allocate(storage.nbytes())
        release = weakref.finalize(storage, self._on_release, key, len(self.storages))
        self._records[key] = release, record
        return record

    def storage(self, tensor: torch.Tensor) -> Storage:
        """The record of a tensor's storage. It is counted if it was not."""
        made = self.count(tensor)
        return made or self._records[tensor.untyped_storage()._cdata][1]

    def declare(self, tensor: torch.Tensor, component: str) -> None:
        """Assign a tensor's storage to a component, from its allocation on."""
        self.storage(tensor).component = component

    def allocate(self, nbytes: int, component: str) -> Callable[[], None]:
        """Count bytes without a tensor until the returned function is called."""
        record = self._allocate(nbytes)
        record.component = component
        index = len(self.storages)
        return lambda: self._release(index)

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor, because its bytes are already counted."""
        record = self.storage(tensor)
        self.live -= record.nbytes
        record.nbytes = 0

    def tracking_resize(
        self, change: Callable[[torch.Tensor], None]
    ) -> Callable[[torch.Tensor], None]:
        """`change`, which may free or refill the storage of a tensor, with the storage counted anew."""

        def run(tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            before = storage.nbytes()
            change(tensor)
            if storage.nbytes() == before:
                return
            known = self._records.get(storage._cdata)
            if known is not None:
                known[0]()
            self.count(tensor)

        return run

    def start(self) -> None:
        """Reset the peaks. Live bytes stay counted."""
        self.peaks.clear()
        self.at_peak.clear()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record peaks under this phase's name, including the live bytes at its start."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def _allocate(self, nbytes: int) -> Storage:
        record = Storage(nbytes, self._phase, self.within)
        self.storages.append(record)
        self.events.append(len(self.storages))
        self.live += nbytes
        return record

    def _release(self, index: int) -> None:
        self.events.append(-index)
        self.live -= self.storages[index - 1].nbytes

    def _on_release(self, key: int, index: int) -> None:
        self._records.pop(key, None)
        self._release(index)

    def _internal_bytes(self, func: Any, args: tuple[Any, ...]) -> list[int]:
        """What the operator's kernel allocates in addition to its results."""
        if func in COPIES_INPUT:
            return [args[0].nbytes]
        workspace = self._workspaces.get(func)
        return [] if workspace is None else workspace(*args)

    def _record_temporaries(self, sizes: list[int]) -> None:
        """Record the allocation and release of a kernel's internal buffers."""
        first = len(self.storages) + 1
        for nbytes in sizes:
            record = self._allocate(nbytes)
            record.component = self.within or "workspace"
        for index in range(first, len(self.storages) + 1):
            self._release(index)

    def _describe(self, made: Storage, func: Any, args: tuple[Any, ...], tensor: Any) -> None:
        """Note where a new storage comes from, by the operator that made it."""
        if func is aten._to_copy.default:
            made.copy_of = self.storage(args[0])
        if self._phase == "backward":
            made.recomputed = torch.is_grad_enabled()
            shape = tensor.shape
            made.wide = len(shape) > 1 and shape[-1] == self._vocabulary


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results, lists of them included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
