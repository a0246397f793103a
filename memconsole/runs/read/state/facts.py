"""What a run's events say: the newest values, the highest peaks, the last record of each kind."""

from __future__ import annotations

import msgspec

from memconsole.runs.read.state.ranks import RankFacts
from memconsole.runs.record.log import events


class FactsSoFar(msgspec.Struct, kw_only=True):
    """The mutable form, which the reducer changes with each record and `state.json` stores."""

    started: events.Started | None = None
    phase: str = "starting"
    phase_detail: str = ""
    parameters: int | None = None
    trainable_parameters: int | None = None
    weights: str = ""
    """Where the model's first weights came from."""
    step: int = 0
    repeats_to: int = 0
    """The last step of the attempts before this one. The attempt repeats the steps after its checkpoint up to this one; 0
    if there are none."""
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    epoch: int = 0
    tokens: int = 0
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    trained_units: float = 0.0
    """Tokens (or the task's unit) of the steps of all attempts, without those that compiled."""
    trained_seconds: float = 0.0
    """Seconds of these steps, without evaluating and saving."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    loss: float | None = None
    jump: events.Jump | None = None
    """The last jump of a hybrid run, with the counts of all of them."""
    memory: events.Memory | None = None
    peaks_by_phase: dict[str, int] = {}
    peak_bytes: int | None = None
    """Live tensor bytes."""
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_host_anonymous_bytes: int | None = None
    peak_host_shared_bytes: int | None = None
    rank_count: int = 1
    """How many ranks the newest attempt has; see `state.ranks`."""
    ranks: tuple[RankFacts, ...] = ()
    """The ranks that have sent a reading."""
    checkpoint: events.Checkpoint | None = None
    sample: events.Sample | None = None
    error: events.Error | None = None
    stopped: events.Stopped | None = None
    ended: events.Ended | None = None
    untrained_seconds: float = 0.0
    """Seconds of the run's attempts that were not training: starts, pauses and waiting for a disk."""
    trained_until: float | None = None
    """Seconds of training when the present start or pause began; None while the run trains."""

    @property
    def average_units_per_second(self) -> float | None:
        """The speed of all steps together; None before the second record of steps."""
        return self.trained_units / self.trained_seconds if self.trained_seconds > 0 else None

    def training_seconds(self, elapsed_seconds: float) -> float:
        """The seconds of training in all attempts, `elapsed_seconds` after the run began."""
        if self.trained_until is not None:
            return self.trained_until
        return max(0.0, elapsed_seconds - self.untrained_seconds)


class RunFacts(FactsSoFar, frozen=True, kw_only=True):  # type: ignore[misc]  # msgspec allows it
    """The same fields at one moment, immutable, for all readers."""


def facts_of(so_far: FactsSoFar, *, phase: str) -> RunFacts:
    """The current facts. `phase` comes from the heartbeat, which can be newer than the events."""
    values = {name: getattr(so_far, name) for name in RunFacts.__struct_fields__}
    peaks = dict(so_far.peaks_by_phase)
    return RunFacts(**values | {"phase": phase, "peaks_by_phase": peaks})
