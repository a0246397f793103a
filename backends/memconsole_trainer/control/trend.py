"""How fast the loss falls in recent gradient steps."""

from __future__ import annotations

import math

import msgspec
import numpy as np

WINDOW = 64
SLOWEST = 1e-4
"""Decrease per step, in nats, below which steps count as equally slow."""


class Trend(msgspec.Struct):
    """The losses of recent gradient steps."""

    losses: list[float] = []

    def add(self, loss: float) -> None:
        """Add the loss of a step."""
        self.losses = [*self.losses, loss][-WINDOW:]

    @property
    def decrease(self) -> float:
        """Nats per step by which the loss falls: the slope of a line through the losses."""
        if len(self.losses) < 2:
            return 0.0
        return -float(np.polyfit(np.arange(len(self.losses)), self.losses, 1)[0])

    @property
    def steepness(self) -> float:
        """The decrease on a scale from -1 to 1."""
        return math.tanh(self.decrease / 0.01)

    def reward(self, decrease: float, work: float) -> float:
        """A jump's decrease per unit of work compared with that of gradient steps, from -1 to 1."""
        return math.tanh(decrease / max(work, 1e-9) / max(self.decrease, SLOWEST))
