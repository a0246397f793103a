"""Dynamic loss scaling of fp16 training (Micikevicius et al. 2018, §3.2): the one specification both backends follow.

Gradients below 2^-24 vanish in fp16, so the loss is multiplied by a scale before the backward pass and the
gradients are divided by it in fp32 before they are measured, clipped and used. The constants are those of
`torch.amp.GradScaler`. Where a gradient is not finite, weights and optimizer state stay as they are, the scale
is halved, and the step is told as skipped; after `GROWTH_STEPS` good steps in a row the scale is doubled.
One decision falls for each effective batch.

The state is one array fp32 (3,): scale, good steps in a row, steps skipped since the start of the run.
"""

from __future__ import annotations

START = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_STEPS = 2000
MOST = 2.0**126
"""Largest scale: its double is still finite."""
NAME = "optimizer.loss_scale"
"""Name of the state among a checkpoint's tensors."""
MOST_SKIPPED = 40
"""Steps skipped in a row before a run is given up: from `START` the scale is then 2^-24, where no gradient is left."""


def is_scaled(precision: str) -> bool:
    """Whether a precision needs loss scaling."""
    return precision == "fp16"


def start() -> tuple[float, float, float]:
    """The state before the first step."""
    return START, 0.0, 0.0
