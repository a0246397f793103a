"""Compares a run's estimate with its measurement: one row per figure, with error and band."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from memconsole.plan.sections.hybrid import PHASES

_STEP = "training step"
_HIGHEST = "memory was highest in this phase, which no estimate covers"
_BETWEEN = {"evaluation": ("evaluate",), "checkpoint": ("checkpoint",)}


def measured_phases(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each phase of an estimate, the trainer's phases that measure it. `names` are the phases of
    the estimate or of the measurement.

    A plain run is measured over whole training steps, a hybrid run in each of its own phases. The
    trainer's phase `compile`, the first step, belongs to the first phase.
    """
    own = set(names)
    steps = [phase for phase in PHASES if phase in own]
    if not steps:
        return {_STEP: ("compile", "train"), **_BETWEEN}
    found: dict[str, tuple[str, ...]] = {phase: (phase,) for phase in steps}
    return found | {steps[0]: ("compile", steps[0])} | _BETWEEN


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. None means not estimated, or not measured."""

    name: str
    estimated_bytes: int | None
    measured_bytes: int | None
    tier: str
    """Tier of the estimate: ~ formula, = traced or compiled, ✓ calibrated; empty if not
    estimated.
    """
    error_percent: float | None
    """Error of the estimate in per cent of the measurement; negative if it was too low."""
    band_bytes: tuple[int, int] | None = None
    inside_band: bool | None = None
    at_least: bool = False
    """True if the measurement is a lower bound: the run ran out of memory, has taken no step or is not finished."""
    note: str = ""
    """Why a figure is missing, or which phase of the step has the highest estimate."""


class EstimatedTable(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a stored memory table that are compared."""

    tier: str
    peak_bytes: int
    device_bytes: int
    host_bytes: int
    reserved_bytes: int | None = None
    band_bytes: tuple[int, int] | None = None
    band_from: str = ""
    phases: dict[str, int] = {}
    peak_phase: str = ""
    phase_tiers: dict[str, str] = {}
    reserved_tier: str = "~"
    device_tier: str = "~"
    host_tier: str = "~"


class MemoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks in bytes. None means not estimated, or not reported by the device."""

    peak_bytes: int | None = None
    """Live tensor bytes."""
    device_bytes: int | None = None
    """What the driver charges to the process."""
    host_bytes: int | None = None
    """Resident memory of the trainer's process tree."""
    reserved_bytes: int | None = None
    """What the framework's allocator holds; None on a CPU, where the C library's heap holds it."""


class MeasuredLine(MemoryLine, frozen=True, kw_only=True):
    """What the trainer measured, with its host memory by kind."""

    host_anonymous_bytes: int | None = None
    host_shared_bytes: int | None = None
    missing: dict[str, str] = {}
    """Why a figure is None, by the figure's name."""


def compare(
    estimated: EstimatedTable | None,
    measured: MemoryLine,
    by_phase: dict[str, int],
    at_least: bool = False,
) -> tuple[Comparison, ...]:
    """One row per total of the memory table, then one per phase of it. A phase without an estimate, such as the start
    or sampling, has a row if its peak is the highest.

    `at_least` makes every measurement a lower bound.
    """
    rows = [_column(name, estimated, measured, at_least) for name in _COLUMNS]
    listed: set[str] = set()
    names = (*by_phase, *(estimated.phases if estimated else ()))
    for name, phases in measured_phases(names).items():
        seen = max((by_phase[p] for p in phases if p in by_phase), default=None)
        guess, tier, note = _phase(estimated, name)
        if seen is not None or guess is not None:
            rows.append(_row(name, guess, seen, tier, at_least=at_least, note=note))
            listed.update(phases)
    highest = max(by_phase, key=lambda phase: by_phase[phase], default="")
    if highest and highest not in listed:
        seen = by_phase[highest]
        rows.append(_row(highest, None, seen, "", at_least=at_least, note=_HIGHEST))
    return tuple(rows)


_COLUMNS = {
    "allocated": ("peak_bytes", "tier"),
    "reserved": ("reserved_bytes", "reserved_tier"),
    "device": ("device_bytes", "device_tier"),
    "host": ("host_bytes", "host_tier"),
}


def _column(
    name: str, estimated: EstimatedTable | None, measured: MemoryLine, at_least: bool
) -> Comparison:
    field, tier = _COLUMNS[name]
    guess = getattr(estimated, field) if estimated else None
    # The band belongs to the device column. It applies to another column only if both estimates are
    # equal.
    banded = estimated is not None and name != "host" and guess == estimated.device_bytes
    missing = measured.missing.get(field, "") if isinstance(measured, MeasuredLine) else ""
    return _row(
        name,
        guess,
        getattr(measured, field),
        getattr(estimated, tier) if estimated else "",
        band=estimated.band_bytes if estimated and banded else None,
        at_least=at_least,
        note=missing,
    )


def _phase(estimated: EstimatedTable | None, name: str) -> tuple[int | None, str, str]:
    """Bytes and tier of a phase of the estimate, and a note on the highest phase of the step."""
    if estimated is None:
        return None, "", ""
    training = name == _STEP
    # A trainer measures the highest of a training step's phases as one.
    found = {
        phase: size
        for phase, size in estimated.phases.items()
        if (phase not in _BETWEEN if training else phase == name)
    }
    if not found:
        return None, "", ""
    highest = max(found, key=found.__getitem__)
    note = f"highest in {highest}" if training else ""
    return found[highest], estimated.phase_tiers.get(highest, "~"), note


def _row(
    name: str,
    guess: int | None,
    seen: int | None,
    tier: str,
    band: tuple[int, int] | None = None,
    at_least: bool = False,
    note: str = "",
) -> Comparison:
    inside = None
    if band is not None and seen is not None:
        # A lower bound can show only that the run needed more than the band.
        inside = (None if seen <= band[1] else False) if at_least else band[0] <= seen <= band[1]
    return Comparison(
        name=name,
        estimated_bytes=guess,
        measured_bytes=seen,
        tier=tier if guess is not None else "",
        error_percent=100 * (guess - seen) / seen if guess is not None and seen else None,
        band_bytes=band,
        inside_band=inside,
        at_least=at_least and seen is not None,
        note=note,
    )
