"""A run as it is at one moment, for whoever watches."""

from __future__ import annotations

import msgspec

from memconsole.plan.plan import Plan
from memconsole.runs.read.facts import RunFacts
from memconsole.runs.record import events
from memconsole.runs.record.states import State, Verdict


class Curve(msgspec.Struct, frozen=True):
    """A decimated series: `steps` ascending, minima and maxima of each bucket kept, last value exact."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """The series as pairs."""
        return tuple((float(s), v) for s, v in zip(self.steps, self.values, strict=False))


class GaugeCurves(msgspec.Struct, frozen=True):
    """Bytes by step: the highest allocated of each stretch, what the device and what the host held."""

    allocated: Curve = Curve()
    device: Curve = Curve()
    host: Curve = Curve()


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a screen or a command needs of a run. Text fields are already free of control characters."""

    id: str
    name: str
    state: State
    plan: Plan
    attempt: int
    created_wall: float
    facts: RunFacts = RunFacts()
    """What its events say; the fields below are added by whoever looks."""
    verdict: Verdict | None = None
    stalled_seconds: float | None = None
    """Seconds without progress when longer than the phase allows."""
    eta_seconds: float | None = None
    """Warm-up and compilation excluded."""
    elapsed_seconds: float = 0.0
    recent_train: Curve = Curve()
    train: Curve = Curve()
    validation: Curve = Curve()
    epochs: tuple[events.Epoch, ...] = ()
    evaluations: tuple[events.Evaluation, ...] = ()
    gauges: GaugeCurves = GaugeCurves()
    warnings: tuple[str, ...] = ()
    log_tail: tuple[str, ...] = ()
    """Last lines of the trainer's output, progress bars resolved."""
    stop_requested_by: str | None = None
    pause_requested: bool = False
    """Someone wants it to wait; it does once `phase` is paused."""
    damaged_records: int = 0
