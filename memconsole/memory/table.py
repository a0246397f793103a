"""The memory table: bytes by component and phase, its peak, and the verdict against a budget."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from memconsole.memory.verdict import Verdict, verdict_of, verdict_words
from memconsole.plan.machine.budget import Budget
from memconsole.plan.toggles.optimization import Note


class Tier(StrEnum):
    """How a number was obtained."""

    FORMULA = "~"
    EXACT = "="
    CALIBRATED = "✓"


COMPONENTS = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "logits and loss",
    "workspace",
    "data",
    "runtime",
)
SNAPSHOTS = "snapshots"
"""A component that only hybrid plans have: earlier weights, and the movement predicted from them."""
EVALUATION = "evaluation"
BETWEEN_STEPS = (EVALUATION, "checkpoint")
"""Phases outside the training step. All other phases of a table belong to it."""


class Component(msgspec.Struct, frozen=True):
    """One row of the table: live bytes in each phase."""

    name: str
    phases: dict[str, int]
    tiers: dict[str, Tier] = {}
    """How the bytes of each phase were obtained. A missing phase is by formula."""

    def at(self, phase: str) -> int:
        return self.phases.get(phase, 0)

    def tier_at(self, phase: str) -> Tier:
        return self.tiers.get(phase, Tier.FORMULA)


class HostBytes(msgspec.Struct, frozen=True):
    """Resident memory of the trainer's processes, before and after the model is built."""

    training: int = 0
    """The most bytes while the run trains."""
    compiling: int = 0
    """The most bytes while XLA compiles the run's programs."""
    code: int = 0
    """Part of both: XLA's compiler, which stays in memory. A run that finds its programs on disk does not load it."""

    @property
    def peak(self) -> int:
        return max(self.training, self.compiling)

    def more(self, bytes_: int) -> HostBytes:
        """These bytes with `bytes_` added while the run trains; `bytes_` may be negative."""
        return msgspec.structs.replace(self, training=self.training + bytes_)

    def compiled(self) -> HostBytes:
        """The bytes of a run whose programs are on disk."""
        return HostBytes(self.training - self.code)


class MemoryTable(msgspec.Struct, frozen=True, kw_only=True):
    """What one plan needs on one device.

    `peak_bytes` is the maximum over phases of the sum over components (allocated bytes). `reserved_bytes`
    adds the allocator's overhead, and `device_bytes` also adds what the driver charges the process.
    """

    backend: str
    budget: Budget
    tier: Tier
    components: tuple[Component, ...]
    phases: dict[str, int]
    peak_phase: str
    peak_bytes: int
    reserved_bytes: int
    device_bytes: int
    devices_in_process: int = 1
    """How many devices of a plan one process has."""
    band_bytes: tuple[int, int]
    """Low and high bound of `device_bytes`."""
    host: HostBytes = HostBytes()
    host_bytes: int = 0
    """Peak resident memory of all processes, as in `host`. Older stored tables have only this number."""
    phase_tiers: dict[str, Tier] = {}
    """How the total of each phase was obtained. A missing phase is by formula."""
    reserved_tier: Tier = Tier.FORMULA
    device_tier: Tier = Tier.FORMULA
    host_tier: Tier = Tier.FORMULA
    """Always the formula: no tracer measures host memory."""
    band_from: str = ""
    """Where the band's width comes from, as one phrase."""
    source: str = ""
    """The tracer or compiler with its version; empty for a table by formula alone."""
    caveat: str = ""
    """What may differ on the real device, in one sentence."""
    least_bytes: int | None = None
    """The smallest allocator capacity in which the step completes; None if not searched."""
    out_of_memory: bool = False
    """True if the compiler refused the program because the device has too little memory."""
    formula: MemoryTable | None = None
    """The same plan by formula alone, if this table has exact numbers."""

    def __post_init__(self) -> None:
        if self.host == HostBytes():
            msgspec.structs.force_setattr(self, "host", HostBytes(self.host_bytes))
        msgspec.structs.force_setattr(self, "host_bytes", self.host.peak)

    @property
    def step_phases(self) -> tuple[str, ...]:
        """The phases that belong to a training step."""
        return tuple(phase for phase in self.phases if phase not in BETWEEN_STEPS)

    def phase_tier(self, phase: str) -> Tier:
        """How the total of `phase` was obtained."""
        return self.phase_tiers.get(phase, Tier.FORMULA)

    @property
    def correction_bytes(self) -> int:
        """What finished runs add to the sum of the components at the peak; negative if they measured less."""
        if self.tier is not Tier.CALIBRATED:
            return 0
        return self.peak_bytes - sum(c.at(self.peak_phase) for c in self.components)

    @property
    def free_bytes(self) -> int:
        """Bytes left of the budget at the peak; negative when over."""
        return self.budget.usable_bytes - self.device_bytes

    @property
    def at_most_bytes(self) -> int:
        """The high end of the band."""
        return max(self.band_bytes[1], self.device_bytes)

    @property
    def verdict(self) -> Verdict:
        """Whether the plan fits, with the band."""
        usable = self.budget.usable_bytes
        return verdict_of(self.device_bytes, self.at_most_bytes, usable, refused=self.out_of_memory)

    @property
    def fits(self) -> bool:
        """Whether the estimate is within the usable memory; the high end of the band may still exceed it."""
        return self.verdict is not Verdict.DOES_NOT_FIT

    @property
    def words(self) -> str:
        """The verdict with the bytes that are free or missing."""
        usable = self.budget.usable_bytes
        return verdict_words(self.verdict, self.device_bytes, self.at_most_bytes, usable)


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """The change of the whole estimate if one toggle is set to one value."""

    key: str
    value: str | int | bool | None
    """None for a setting that may be left out, such as the rows of an evaluation batch."""
    saves_bytes: int
    """Device bytes of this plan minus those of the changed plan; negative if the change costs memory."""
    time_factor: float
    """Step seconds of the changed plan over those of this plan, per token."""
    reason: str
    """Why nothing is saved, or why the changed plan cannot be launched; empty otherwise."""
    available: bool = True
    """Whether the plan's backend can train with it on this kind of device."""
    tier: Tier = Tier.FORMULA
    """The tier of `saves_bytes`: exact only if both plans are."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's memory and time, with every toggle's effect."""

    table: MemoryTable
    savings: tuple[Saving, ...]
    parameters: int
    trainable_parameters: int
    step_seconds: float
    tokens_per_second: float
    peak_tokens_per_second: float
    """The rate at the dense peak of all devices. Measured tokens per second divided by it is the model FLOPs utilization."""
    epoch_minutes: float | None
    """None if the dataset's size is not known before the run."""
    run_steps: int | None = None
    """Optimizer steps of the whole run; None if the size of its data is unknown."""
    active_parameters: int | None = None
    """Parameters that one token uses, if the model has experts: all but those of experts that it does not go to."""
    run_seconds: float | None = None
    """The whole run with its start; None if `run_steps` is."""
    notes: tuple[Note, ...] = ()
    """Notes on the plan's optimizations for the user, before a run starts."""
    time_tier: Tier = Tier.FORMULA
    """How the times were obtained: calibrated only if runs of the same kind of plan measured them."""
    time_from: str = ""
    """Which runs corrected the times, as one phrase; empty if none did."""

    @property
    def peak_is_known(self) -> bool:
        """Whether the device's peak rate is known and not assumed for its kind."""
        budget = self.table.budget
        return budget.kind == "cpu" or bool(budget.peak_flops)
