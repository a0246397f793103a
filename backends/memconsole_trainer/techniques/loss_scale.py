"""Dynamic loss scaling of fp16 training (Micikevicius et al. 2018, §3.2): the specification of both
backends.

Gradients below 2^-24 vanish in fp16. The loss is therefore multiplied by a scale before the
backward pass, and the gradients are divided by it in fp32 before they are measured, clipped and
used. The constants are those of `torch.amp.GradScaler`. If a gradient is not finite, weights and
optimizer state do not change, the scale is halved, and the step is reported as skipped. After
`GROWTH_STEPS` good steps in a row the scale is doubled. There is one decision per effective batch.

The state is one fp32 array (3,): scale, good steps in a row, steps skipped since the start of the
run.
"""

from __future__ import annotations

START = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_STEPS = 2000
MOST = 2.0**126
"""Largest scale; twice this value is still finite."""
NAME = "optimizer.loss_scale"
"""Name of the state in a checkpoint."""
MOST_SKIPPED = 40
"""A run fails after this many skipped steps in a row: the scale has then gone from `START` to
2^-24."""


def is_scaled(precision: str) -> bool:
    """Whether a precision needs loss scaling."""
    return precision == "fp16"


def start() -> tuple[float, float, float]:
    """The state before the first step."""
    return START, 0.0, 0.0
