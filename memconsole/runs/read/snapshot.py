"""A run as it is at one moment, for whoever watches."""

from __future__ import annotations

import msgspec

from memconsole.plan.plan import Plan
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
    verdict: Verdict | None = None
    started: events.Started | None = None
    phase: str = "starting"
    phase_detail: str = ""
    stalled_seconds: float | None = None
    """Seconds without progress when longer than the phase allows."""
    parameters: int | None = None
    trainable_parameters: int | None = None
    step: int = 0
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    epoch: int = 0
    tokens: int = 0
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    loss: float | None = None
    eta_seconds: float | None = None
    """Warm-up and compilation excluded."""
    elapsed_seconds: float = 0.0
    recent_train: Curve = Curve()
    train: Curve = Curve()
    validation: Curve = Curve()
    epochs: tuple[events.Epoch, ...] = ()
    evaluations: tuple[events.Evaluation, ...] = ()
    memory: events.Memory | None = None
    peaks_by_phase: dict[str, int] = {}
    peak_bytes: int | None = None
    """Live tensor bytes."""
    peak_reserved_bytes: int | None = None
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    gauges: GaugeCurves = GaugeCurves()
    checkpoint: events.Checkpoint | None = None
    sample: events.Sample | None = None
    warnings: tuple[str, ...] = ()
    error: events.Error | None = None
    ended: events.Ended | None = None
    log_tail: tuple[str, ...] = ()
    """Last lines of the trainer's output, progress bars resolved."""
    stop_requested_by: str | None = None
    pause_requested: bool = False
    """Someone wants it to wait; it does once `phase` is paused."""
    damaged_records: int = 0
