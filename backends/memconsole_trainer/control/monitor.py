"""Watches losses and gradient norms for divergence."""

from __future__ import annotations

import enum
import math

import msgspec

from memconsole.plan.sections.hybrid import HybridChoice

DECAY = 0.95
"""Decay of the running means."""
LEAST = 20
"""Steps before deviations are judged."""
CRITICAL = 2.0
"""A deviation of the loss of this many times the plan's limit is critical."""
CRITICAL_NORM = 10.0
"""A gradient norm of this many times the plan's limit is critical."""
WARNINGS = 3
"""This many warnings in a row are critical, too."""

OSCILLATING = 0.8
"""Share of steps at which the loss crosses its running mean; noise crosses it at half of them."""
WINDOW = 40
"""Steps over which crossings are counted."""
CAUTION = 0.7
"""Share of the limit at which jumps become shorter."""


class Reaction(enum.IntEnum):
    """How to react to a gradient step, the mildest reaction first."""

    FINE = 0
    SHORTER = 1
    """Jump less far."""
    FULL = 2
    """Compute gradients for a while."""
    ROLLBACK = 3
    """Undo the latest jumps, if no correct phase has ended since, and compute gradients."""


class Judgement(msgspec.Struct, frozen=True):
    """A reaction and its reason."""

    reaction: Reaction
    reason: str = ""


class Monitor(msgspec.Struct):
    """Running statistics of a run. Losses are compared with their running mean and deviation, norms
    with their running mean."""

    seen: int = 0
    mean: float = 0.0
    square: float = 0.0
    """Running mean of squared deviations of the loss."""
    norm: float = 0.0
    crossings: list[int] = []
    """1 for each recent step at which the loss crossed its mean, else 0."""
    side: int = 0
    warnings: int = 0
    """Warnings in a row."""

    def observe(self, loss: float, norm: float, choice: HybridChoice) -> Judgement:
        """Judge a gradient step, and count it if it is finite; an outlier counts only up to a limit."""
        judged = self._judge(loss, norm, choice)
        self.warnings = self.warnings + 1 if judged.reaction is Reaction.FULL else 0
        if self.warnings >= WARNINGS:
            self.warnings = 0
            judged = Judgement(Reaction.ROLLBACK, f"{judged.reason}, {WARNINGS} times in a row")
        if math.isfinite(loss) and math.isfinite(norm):
            self._count(loss, norm, choice.loss_sigma)
        return judged

    @property
    def sigma(self) -> float:
        """Standard deviation of the loss about its running mean."""
        return math.sqrt(self.square)

    def _judge(self, loss: float, norm: float, choice: HybridChoice) -> Judgement:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Judgement(Reaction.ROLLBACK, "the loss or the gradient is not finite")
        if self.seen < LEAST:
            return Judgement(Reaction.FINE)
        found = [self._of_loss(loss, choice), *self._of_norm(norm, choice)]
        if len(self.crossings) == WINDOW and sum(self.crossings) > OSCILLATING * WINDOW:
            found.append(Judgement(Reaction.FULL, "the loss oscillates"))
        return max(found, key=lambda judged: judged.reaction)

    def _of_loss(self, loss: float, choice: HybridChoice) -> Judgement:
        limit = choice.loss_sigma
        away = (loss - self.mean) / self.sigma if self.sigma else 0.0
        reason = f"the loss of {loss:.4g} is {away:.1f} sigma above its mean {self.mean:.4g}"
        for reaction, share in (
            (Reaction.ROLLBACK, CRITICAL),
            (Reaction.FULL, 1.0),
            (Reaction.SHORTER, CAUTION),
        ):
            if away > share * limit:
                return Judgement(reaction, reason)
        return Judgement(Reaction.FINE)

    def _of_norm(self, norm: float, choice: HybridChoice) -> list[Judgement]:
        times = norm / self.norm if self.norm else 1.0
        reason = f"the gradient norm of {norm:.3g} is {times:.3g} times its mean"
        if times > CRITICAL_NORM * choice.gradient_factor:
            return [Judgement(Reaction.ROLLBACK, reason)]
        if times > choice.gradient_factor or times < choice.vanishing_factor:
            return [Judgement(Reaction.FULL, reason)]
        return []

    def _count(self, loss: float, norm: float, sigmas: float) -> None:
        if self.seen >= LEAST:
            loss = min(loss, self.mean + sigmas * self.sigma)
            norm = min(norm, 2 * self.norm)
        share = max(1.0 - DECAY, 1.0 / (self.seen + 1))
        away = loss - self.mean
        self.mean += share * away
        self.square = (1.0 - share) * (self.square + share * away * away)
        self.norm += share * (norm - self.norm)
        side = 1 if away > 0 else -1
        self.crossings = [*self.crossings, int(side == -self.side)][-WINDOW:]
        self.side = side
        self.seen += 1
