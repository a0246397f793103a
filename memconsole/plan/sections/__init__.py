"""The plan: its sections, and what follows from several of them."""

from __future__ import annotations

from typing import Annotated

from memconsole.plan.sections.data import DataChoice
from memconsole.plan.sections.device import DeviceChoice
from memconsole.plan.sections.hybrid import HybridChoice
from memconsole.plan.sections.launching import LaunchChoice
from memconsole.plan.sections.model import ModelChoice
from memconsole.plan.sections.optimize import OptimizeChoice
from memconsole.plan.sections.section import Section, about
from memconsole.plan.sections.train import OBJECTIVE_NAMES, TrainChoice

BACKENDS = ("torch", "jax")
"""The backends of this project; others may be installed."""


class Plan(Section, frozen=True, kw_only=True):
    """Everything picked for one run. `Plan()` is the default plan."""

    backend: Annotated[str, about("torch, jax, or an installed backend")] = "torch"
    model: ModelChoice = ModelChoice()
    data: DataChoice = DataChoice()
    device: DeviceChoice = DeviceChoice()
    train: TrainChoice = TrainChoice()
    optimize: OptimizeChoice = OptimizeChoice()
    hybrid: HybridChoice = HybridChoice()
    launch: LaunchChoice = LaunchChoice()

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens one device holds at a time."""
        return self.train.batch_size * self.data.sequence_length

    @property
    def effective_batch(self) -> int:
        """Rows per optimizer step over all devices."""
        return self.train.batch_size * self.optimize.accumulation_steps * self.device.count

    @property
    def evaluation_batch(self) -> int:
        """Rows one device holds at a time while it evaluates."""
        return self.train.evaluation_batch_size or self.train.batch_size

    def evaluation_batches(self, number: int) -> int:
        """How many batches of `evaluation_batch` rows hold the rows of `number` batches, as `train.evaluation_batches`
        counts them: without `train.evaluation_batch_size` each has the rows of a step, however these are split."""
        parts = 1 if self.train.evaluation_batch_size else self.optimize.accumulation_steps
        return number * parts

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step over all devices."""
        return self.effective_batch * self.data.sequence_length

    @property
    def rows_together(self) -> int:
        """Rows that no micro-batch may part: both answers of a pair, otherwise single rows."""
        return 2 if self.learns_pairs else 1

    @property
    def learns_pairs(self) -> bool:
        """Whether the model learns which of two answers is preferred."""
        return self.train.objective != "next-token"

    @property
    def objective_name(self) -> str:
        """The objective as papers write it: ``DPO``."""
        return OBJECTIVE_NAMES[self.train.objective]

    @property
    def learns_answers(self) -> bool:
        """Whether only the answers of records count in the loss."""
        return self.data.loss_on == "answers" or self.learns_pairs

    @property
    def stride(self) -> int:
        """Tokens between the starts of two rows."""
        return self.data.stride or self.data.sequence_length
