"""Counts the jumps of a run: those that moved the weights for good, and the steps that they stand for."""

from __future__ import annotations

import msgspec


class Tally(msgspec.Struct):
    """Counts since the run began, in all attempts."""

    tried: int = 0
    kept: int = 0
    undone: int = 0
    steps: float = 0.0
    """Gradient steps that the kept jumps stand for."""
    unsettled: list[float] = []
    """The part of `steps` that may still be undone: one number for each such jump."""

    @property
    def steps_saved(self) -> float:
        """`steps`, less one step for each jump that was tried."""
        return self.steps - self.tried

    def count(self, steps: float, accepted: bool) -> None:
        """Count a jump that stands for `steps` gradient steps."""
        self.tried += 1
        if accepted:
            self.kept += 1
            self.steps += steps
            self.unsettled = [*self.unsettled, steps]

    def settle(self) -> None:
        """The jumps so far will not be undone."""
        self.unsettled = []

    def undo(self) -> None:
        """The jumps since `settle` were taken back."""
        self.kept -= len(self.unsettled)
        self.undone += len(self.unsettled)
        self.steps -= sum(self.unsettled)
        self.unsettled = []
