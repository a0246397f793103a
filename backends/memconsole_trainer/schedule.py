"""The learning rate of every optimizer step, as a pure function both backends call."""

from __future__ import annotations

import math

from memconsole.plan.plan import Plan


def warmup_steps(plan: Plan, total_steps: int) -> int:
    """Steps of warm-up: the plan's, but a tenth of a run of which they would be more than half."""
    wanted = plan.train.warmup_steps
    return wanted if 2 * wanted <= total_steps else total_steps // 10


def learning_rate(step: int, plan: Plan, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0, of `total_steps`.

    The warm-up rises linearly and reaches the peak at its last step, so no step has a rate of 0.
    Afterwards the rate is constant, or falls linearly or along half a cosine (Loshchilov and
    Hutter 2017, eq. 5) to `minimum_learning_rate · peak` at the last step, and stays there.
    """
    t = plan.train
    warmup = warmup_steps(plan, total_steps)
    if step < warmup:
        return t.learning_rate * (step + 1) / warmup
    if t.schedule == "constant":
        return t.learning_rate
    span = max(total_steps - 1 - warmup, 1)
    progress = min((step - warmup) / span, 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    share = 1.0 - progress if t.schedule == "linear" else cosine
    low = t.minimum_learning_rate
    return t.learning_rate * (low + (1.0 - low) * share)
