"""The interface of a training task: what is learned, the arrays of a batch, the units and the measures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from memconsole.plan.models.model import Model, Parameter
from memconsole.plan.sections import Plan
from memconsole.units import format_measure

DTYPE_BYTES = {"int32": 4, "float32": 4}


class Measure(msgspec.Struct, frozen=True):
    """A number that a run reports, with its names on screens and in reports."""

    key: str
    """Its name in events and in `report --json`."""
    label: str
    unit: str = ""
    lower_is_better: bool = True
    short: str = ""
    """Its name in narrow places; if empty, the label is used."""
    headline: bool = True
    """Whether screens and logs show it. Reports hold all measures."""
    summed_up: bool = False
    """Whether the summary of an ended run shows it although it is no headline."""

    @property
    def name(self) -> str:
        """The shorter of its names."""
        return self.short or self.label

    def told(self, value: float | None) -> str:
        """A value with its unit, or with its label if it has none: ``1.6689 nats``, ``0.0161 masked MSE``. None stands for
        a value that is not finite."""
        return (
            "not finite" if value is None else f"{format_measure(value)} {self.unit or self.label}"
        )

    @property
    def direction(self) -> str:
        """Which values are better, in words."""
        return "lower is better" if self.lower_is_better else "higher is better"


class Input(msgspec.Struct, frozen=True):
    """One array of a batch: `(micro_batches, micro_batch, *shape)`."""

    name: str
    dtype: Literal["int32", "float32"]
    shape: tuple[int, ...]
    """Shape of one row."""
    fill: int = 0
    """The value of padding rows, which do not count in the loss."""

    @property
    def row_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


class Task(Protocol):
    """What is learned. One file in `plan/tasks` implements it without a framework."""

    name: str
    model_type: type[Model]
    """The type of the models that learn it; each task has its own."""
    unit: str
    """What training counts, in the singular: token, window, interaction. Each one has an output of its own."""
    units: str
    """The plural of `unit`."""
    positions: str
    """The elements of a row, in the plural: tokens, steps."""
    loss: Measure
    """What training minimizes; its sum over a batch is divided by the batch's weight. A loss in nats is per `unit`."""
    measures: tuple[Measure, ...]
    """What an evaluation sums in addition to the loss."""
    derived: tuple[Measure, ...]
    """What the trainer computes from these sums and the data."""
    judges: tuple[Measure, ...]
    """What the best checkpoint is chosen by, in order of preference; the loss, where none of them was
    measured."""
    files: tuple[str, ...]
    """Suffixes of the files that it reads; empty if it reads text."""
    baselines: tuple[Measure, ...]
    """Losses of trivial models on the held-out rows, for comparison. Each label names the model: ``popularity``."""
    beside_base: str
    """What is trained besides a frozen base without adapters, in words; empty if nothing is."""

    def inputs(self, plan: Plan, model: Model) -> tuple[Input, ...]:
        """The arrays of a batch."""
        ...

    def sums(self, model: Model) -> int:
        """How many sums a backend returns for an evaluation in addition to that of the loss: one for each of
        `measures`, in their order, unless the task says otherwise."""
        ...

    def units_per_row(self, plan: Plan) -> int:
        """Units in one row of a batch that has no padding."""
        ...

    def trained(self, plan: Plan, model: Model) -> list[Parameter]:
        """The weights of the model that the optimizer updates, beside adapters. All others are frozen
        (`plan/training/trained.py`). A task without adapters or without a base to freeze refuses
        `optimize.lora_rank` or `optimize.freeze_base` in `check`."""
        ...

    def flops_per_row(self, plan: Plan, model: Model) -> float:
        """Floating-point operations of one row's forward pass."""
        ...

    def not_applicable(self, plan: Plan) -> Mapping[str, str]:
        """Settings that change nothing in this task, by key, each with the reason in one clause."""
        ...

    def check(self, plan: Plan, model: Model) -> None:
        """Raise `PlanError` for settings that this task cannot train with."""
        ...
