"""The order of the phases of hybrid training, and the confidence that decides when to predict."""

from __future__ import annotations

import msgspec

from memconsole.plan.sections.hybrid import HybridChoice, PhaseName

WEIGHT = 0.25
"""Share of a jump's score in the confidence after it."""
RECOVERY = 0.25
"""Share of lost confidence that returns in a full phase, so that jumps are tried again now and then.
It is divided by one more than the failures in a row."""


class Confidence(msgspec.Struct):
    """How far recent jumps lowered the loss as predicted: 1 if all did, or if there were none."""

    value: float = 1.0
    failures: int = 0
    """Jumps in a row that were rolled back."""

    def score(self, predicted: float, actual: float, accepted: bool) -> None:
        """Count a jump. It counts in full if the loss fell by at least half of the prediction."""
        score = min(1.0, 2.0 * actual / predicted) if accepted and predicted > 0 else 0.0
        self.value += WEIGHT * (score - self.value)
        self.failures = 0 if accepted else self.failures + 1

    def recover(self) -> None:
        """Count a full phase."""
        self.value += RECOVERY / (1 + self.failures) * (1.0 - self.value)


class Phases(msgspec.Struct):
    """Which phase the next step belongs to.

    warmup → full → (predict → correct, at most `predict_rounds` times) → full → …
    """

    phase: PhaseName = "warmup"
    taken: int = 0
    """Steps taken in this phase."""
    length: int = 0
    """Steps that the phase has."""
    rounds: int = 0
    """Predict phases since the last full phase."""
    entered: int = 0
    """Phases entered so far."""

    @classmethod
    def begin(cls, choice: HybridChoice) -> Phases:
        """The phases of a new run."""
        found = cls(length=choice.lengths.warmup_steps)
        if not found.length:
            found.force_full(choice)
        return found

    def after_step(self, choice: HybridChoice, confidence: float, ready: bool) -> None:
        """Count a step, and enter the next phase if it was the last of this one. A predict phase
        follows only if `confidence` suffices and there are enough snapshots (`ready`)."""
        self.taken += 1
        if self.taken < self.length:
            return
        if self.phase == "predict":
            self._enter("correct", choice.correct_steps)
            return
        sure = ready and confidence >= choice.lengths.confidence
        if self.phase != "warmup" and sure and self.rounds < choice.predict_rounds:
            self.rounds += 1
            self._enter("predict", choice.correction_interval)
        else:
            self.force_full(choice)

    def cut(self) -> None:
        """End this phase with the step that is being taken."""
        self.length = self.taken + 1

    def force_full(self, choice: HybridChoice, times: int = 1) -> None:
        """Begin a full phase of `times` the usual length."""
        self.rounds = 0
        self._enter("full", times * choice.lengths.full_steps)

    @property
    def left(self) -> int:
        """Steps of this phase that are not taken yet."""
        return self.length - self.taken

    def _enter(self, phase: PhaseName, length: int) -> None:
        self.phase, self.taken, self.length = phase, 0, length
        self.entered += 1
