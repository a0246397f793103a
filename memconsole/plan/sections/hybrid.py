"""The plan's section on hybrid training: phases that compute gradients alternate with phases that predict weights.

    warmup → full → predict → correct → predict → correct → … → full → …

A step of warmup, full or correct is an ordinary optimizer step. A step of predict computes no gradient: it extrapolates
the weights along their recent path and keeps the result only if the loss of a batch that was not trained on falls.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from memconsole.plan.sections.section import MOST, Section, about

HybridMode = Literal["off", "conservative", "balanced", "aggressive"]
Predictor = Literal["extrapolate", "dmd", "nowcast"]
PhaseName = Literal["warmup", "full", "predict", "correct"]
GRADIENT_PHASES: tuple[PhaseName, ...] = ("warmup", "full", "correct")
RESTORE = "restore"
"""The part of a predict phase in which the optimizer state is on its way back."""
PHASES: tuple[str, ...] = ("warmup", "full", "predict", RESTORE, "correct")
"""The phases that a run reports, in their order."""
PhaseMemory = Literal["none", "cpu", "pinned", "compress", "reinitialize"]
PhasePrecision = Literal["same", "fp32", "bf16"]
Accumulating = Literal["normalize", "scale-rate"]
Reward = Literal["work", "seconds"]
LEAST_MOVEMENTS = 3
"""Movements between snapshots that a path needs."""


class PhaseLengths(msgspec.Struct, frozen=True):
    """The numbers that a mode stands for."""

    warmup_steps: int
    full_steps: int
    horizon: int
    confidence: float


MODES: dict[HybridMode, PhaseLengths] = {
    "conservative": PhaseLengths(200, 30, 25, 0.90),
    "balanced": PhaseLengths(100, 20, 40, 0.85),
    "aggressive": PhaseLengths(50, 15, 80, 0.75),
}
"""The values of tzervas/hybrid-predict-trainer-rs, RECOMMENDED_CONFIGS.toml."""

_Steps = Annotated[int, Meta(ge=1, le=MOST)]


def _by_mode(name: str) -> str:
    """The values of the modes, in their order: ``none: 200, 100 or 50, by the mode``."""
    *others, last = (f"{getattr(lengths, name):g}" for lengths in MODES.values())
    return f"none: {', '.join(others)} or {last}, by the mode"


class HybridChoice(Section, frozen=True, kw_only=True):
    mode: Annotated[
        HybridMode, about("predict weights between phases of training; how often and how far")
    ] = "off"
    warmup_steps: Annotated[
        Annotated[int, Meta(ge=0, le=MOST)] | None,
        about(f"gradient steps before anything is predicted; {_by_mode('warmup_steps')}"),
    ] = None
    full_steps: Annotated[
        _Steps | None, about(f"gradient steps of a full phase; {_by_mode('full_steps')}")
    ] = None
    correct_steps: Annotated[
        int, about("gradient steps after each predict phase", ge=1, le=MOST)
    ] = 5
    horizon: Annotated[
        _Steps | None, about(f"most gradient steps that a jump stands for; {_by_mode('horizon')}")
    ] = None
    confidence: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        about(
            f"predict only if at least this share of recent jumps succeeded; {_by_mode('confidence')}"
        ),
    ] = None
    correction_interval: Annotated[int, about("most steps of a predict phase", ge=1, le=1_000)] = 2
    predict_rounds: Annotated[
        int, about("most predict phases between two full phases", ge=1, le=1_000)
    ] = 5
    predictor: Annotated[
        Predictor,
        about("the mean of recent movements, their dynamic modes, or a regression learned online"),
    ] = "nowcast"
    snapshots: Annotated[int, about("weight snapshots kept on the host in bf16", ge=4, le=100)] = 6
    snapshot_stride: Annotated[
        int, about("gradient steps between two snapshots", ge=1, le=100_000)
    ] = 3
    reward: Annotated[
        Reward,
        about(
            "cost used to compare jump lengths; work: forward passes (reproducible); seconds: as measured (not reproducible)"
        ),
    ] = "work"
    memory: Annotated[
        PhaseMemory,
        about("optimizer state in predict phases: kept, on the host, in 8 bits, or started anew"),
    ] = "none"
    restore_ahead: Annotated[
        int,
        about(
            "how many steps before the end of a predict phase the optimizer state starts coming back",
            ge=0,
            le=1_000,
        ),
    ] = 1
    warmup_precision: Annotated[
        PhasePrecision, about("compute of the warmup phase; same: optimize.precision")
    ] = "same"
    full_precision: Annotated[
        PhasePrecision, about("compute of full phases; same: optimize.precision")
    ] = "same"
    predict_precision: Annotated[
        PhasePrecision, about("weights and compute of predict phases; same: optimize.precision")
    ] = "bf16"
    correct_precision: Annotated[
        PhasePrecision, about("compute of correct phases; same: optimize.precision")
    ] = "same"
    accumulation: Annotated[
        Accumulating,
        about(
            "gradients of micro-batches: their mean, or their sum at a learning rate divided by their number"
        ),
    ] = "normalize"
    loss_sigma: Annotated[
        float, about("standard deviations of the loss that count as divergence", gt=0.0)
    ] = 3.0
    gradient_factor: Annotated[
        float, about("growth of the gradient norm that counts as divergence", gt=1.0)
    ] = 100.0
    vanishing_factor: Annotated[
        float, about("share of the usual gradient norm that counts as vanishing", ge=0.0, lt=1.0)
    ] = 0.01

    @property
    def on(self) -> bool:
        """Whether weights are predicted."""
        return self.mode != "off"

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients of micro-batches are added up, so that training depends on their number."""
        return self.on and self.accumulation == "scale-rate"

    @property
    def lengths(self) -> PhaseLengths:
        """The mode's numbers, or those that are given. Raises KeyError if the mode is off."""
        usual = MODES[self.mode]
        own = {n: getattr(self, n) for n in usual.__struct_fields__}
        return msgspec.structs.replace(usual, **{n: v for n, v in own.items() if v is not None})

    def precision_of(self, phase: PhaseName) -> PhasePrecision:
        """The precision of a phase."""
        precision: PhasePrecision = getattr(self, f"{phase}_precision")
        return precision
