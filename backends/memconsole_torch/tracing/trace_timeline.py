"""Turns a recorded step into an affine timeline: how each allocation depends on the sizes, and its component."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memconsole.memory.exact import affine
from memconsole.memory.exact.affine import TERMS
from memconsole.memory.exact.allocator import rounded
from memconsole.memory.exact.timeline import AffineMoment
from memconsole.memory.table import COMPONENTS
from memconsole_torch.tracing.trace_liveness import Liveness, Storage
from memconsole_torch.tracing.trace_sizes import ONE, Coefficient, DistinctSizes

OUTSIDE = ("build", "end")
"""Pseudo-phases before the first step and after the end of the trace."""


def coefficients(
    live: Liveness, sizes: DistinctSizes | None, evaluated: DistinctSizes | None, kind: str
) -> list[Coefficient]:
    """The coefficient of each storage. Without `sizes` all are constants.

    CUDA's allocator rounds each block up. Only constants are rounded here; for other storages it matters little.
    """
    on_card = kind in ("gpu", "rocm")
    of_storages = []
    for storage in live.storages:
        constant = sizes is None or (
            storage.phase in ("build", "optimizer step") and storage.component != "data"
        )
        own = storage.component or storage.within
        if constant or own in ("weights", "gradients", "optimizer state"):
            coefficient = Coefficient(ONE, storage.nbytes)
        else:
            traced = evaluated if storage.phase == "evaluation" else sizes
            assert traced is not None
            coefficient = traced.coefficient(storage.nbytes)
        if on_card and coefficient.term == ONE and coefficient.factor:
            coefficient = Coefficient(ONE, rounded(coefficient.factor))
        of_storages.append(coefficient)
    return of_storages


def moments(
    live: Liveness, of_storages: Sequence[Coefficient]
) -> dict[str, tuple[AffineMoment, ...]]:
    """By phase, every moment that can be its peak."""
    components = _components(live)
    phases: dict[str, dict[tuple[int, ...], AffineMoment]] = {}
    for phase, levels in _live_bytes(live, of_storages, components):
        total = tuple(map(sum, zip(*levels, strict=True)))
        seen = phases.setdefault(phase, {})
        if total not in seen:
            named = {
                name: tuple(row) for name, row in zip(COMPONENTS, levels, strict=True) if any(row)
            }
            seen[total] = AffineMoment(total=total, components=named)
    return {phase: affine.largest_moments(seen.values()) for phase, seen in phases.items()}


def _live_bytes(
    live: Liveness, of_storages: Sequence[Coefficient], components: Sequence[int]
) -> Iterator[tuple[str, list[list[int]]]]:
    """Live bytes by component and term, at each local maximum and at the start of each phase."""
    live_bytes = [[0] * len(TERMS) for _ in COMPONENTS]
    phase, growing = "build", False
    for event in live.events:
        if isinstance(event, str):
            if growing and phase not in OUTSIDE:
                yield phase, live_bytes
            phase, growing = event, True
            continue
        index = abs(event) - 1
        if event < 0 and growing and phase not in OUTSIDE:
            yield phase, live_bytes
        growing = event > 0
        c = of_storages[index]
        live_bytes[components[index]][c.term] += c.factor if event > 0 else -c.factor


def _components(live: Liveness) -> list[int]:
    """The index in `COMPONENTS` of each storage's component."""
    released_in = _release_phases(live)
    return [
        COMPONENTS.index(_component(storage, released_in[index]))
        for index, storage in enumerate(live.storages)
    ]


def _release_phases(live: Liveness) -> list[str]:
    """The phase in which each storage is released."""
    phases = ["end"] * len(live.storages)
    phase = "build"
    for event in live.events:
        if isinstance(event, str):
            phase = event
        elif event < 0:
            phases[-event - 1] = phase
    return phases


def _component(storage: Storage, released_in: str) -> str:
    """The component of a storage: as declared, else by where and when it was allocated."""
    if storage.component is not None:
        return storage.component
    origin = storage.copy_of
    if origin is not None and origin.component in ("weights", "data"):
        return origin.component
    if storage.within is not None:
        return storage.within
    if storage.phase in ("forward", "evaluation"):
        is_temporary = storage.phase == released_in == "forward"
        return "workspace" if is_temporary else "activations"
    if storage.wide:
        return "logits and loss"
    return "activations" if storage.recomputed else "workspace"
