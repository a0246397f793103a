"""The memory table: bytes by component and phase, its peak, and the verdict against a budget."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from memconsole.plan.budget import Budget


class Tier(StrEnum):
    """How a number was come by."""

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
BETWEEN_STEPS = ("evaluation", "checkpoint")
"""Phases that are no part of a training step; every other phase of a table is."""


class Component(msgspec.Struct, frozen=True):
    """One row: live bytes in each phase it is live in."""

    name: str
    phases: dict[str, int]
    tiers: dict[str, Tier] = {}
    """By phase, how its bytes were come by; a phase that is not here is by formula."""

    def at(self, phase: str) -> int:
        return self.phases.get(phase, 0)

    def tier_at(self, phase: str) -> Tier:
        return self.tiers.get(phase, Tier.FORMULA)


class MemoryTable(msgspec.Struct, frozen=True, kw_only=True):
    """What one plan needs on one device.

    `peak_bytes` is the maximum over phases of the sum over components (allocated); `reserved_bytes`
    adds what the framework's allocator holds, `device_bytes` what the driver charges the process.
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
    host_bytes: int
    band_bytes: tuple[int, int]
    """Low and high bound of `device_bytes`."""
    phase_tiers: dict[str, Tier] = {}
    """By phase, how its total was come by; a phase that is not here is by formula."""
    reserved_tier: Tier = Tier.FORMULA
    device_tier: Tier = Tier.FORMULA
    host_tier: Tier = Tier.FORMULA
    band_from: str = ""
    """Where the band's width comes from, as one phrase."""
    source: str = ""
    """What traced or compiled the plan, with versions; empty where nothing did."""
    caveat: str = ""
    """What may differ on the real device, in one sentence."""
    least_bytes: int | None = None
    """The smallest allocator capacity in which the step completes; None where not searched."""
    out_of_memory: bool = False
    """The compiler refused the program for this device."""
    formula: MemoryTable | None = None
    """The same plan by formula alone, where this table is sharper."""

    @property
    def step_phases(self) -> tuple[str, ...]:
        """Its phases that are part of a training step."""
        return tuple(phase for phase in self.phases if phase not in BETWEEN_STEPS)

    def phase_tier(self, phase: str) -> Tier:
        """How the total of `phase` was come by."""
        return self.phase_tiers.get(phase, Tier.FORMULA)

    @property
    def free_bytes(self) -> int:
        """Bytes left of the budget at the peak; negative when over."""
        return self.budget.usable_bytes - self.device_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0 and not self.out_of_memory


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """What changing one toggle to one value would do to the whole estimate."""

    key: str
    value: str | int | bool | None
    """None where the setting may be left out, as the rows of an evaluation batch may."""
    saves_bytes: int
    """Device bytes of this plan less those of the changed plan; negative when it costs."""
    time_factor: float
    """Step seconds of the changed plan over those of this plan, per token."""
    reason: str
    """Why nothing is saved, or why it cannot be launched; empty otherwise."""
    available: bool = True
    """Whether the plan's backend can train with it on this kind of device."""
    tier: Tier = Tier.FORMULA
    """Of `saves_bytes`: exact only where both plans are."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's memory and time, with every toggle's effect."""

    table: MemoryTable
    savings: tuple[Saving, ...]
    parameters: int
    trainable_parameters: int
    step_seconds: float
    tokens_per_second: float
    peak_tokens_per_second: float
    """At the device's dense peak: measured tokens per second over these are the model FLOPs utilization."""
    epoch_minutes: float | None
    """None when the dataset's size is not known before the run."""
