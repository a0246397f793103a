"""The learning rate of every optimizer step, as a pure function that both backends call."""

from __future__ import annotations

import math

from memconsole.plan.plan import Plan
from memconsole.plan.training.recipe import peak_learning_rate, warmup_steps


def decay_steps(plan: Plan, total_steps: int) -> int:
    """Number of steps at the end of a `wsd` run in which the rate decays. They never overlap the
    warm-up."""
    wanted = max(1, round(plan.train.decay_share * total_steps))
    return min(wanted, max(1, total_steps - warmup_steps(plan, total_steps)))


def summed_batches(plan: Plan) -> int:
    """The number of micro-batches whose mean gradients are added up instead of averaged. The learning rate is
    divided by it. 1 unless `hybrid.accumulation` is scale-rate."""
    return plan.optimize.accumulation_steps if plan.hybrid.sums_gradients else 1


def learning_rate(step: int, plan: Plan, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0, of `total_steps`.

    The warm-up rises linearly and reaches the peak at its last step, so no step has a rate of 0.
    Afterwards the rate is constant, or falls linearly or along half a cosine (Loshchilov and Hutter
    2017, eq. 5) to `minimum_learning_rate · peak` at the last step, or at step `decay_until` counted
    from 1 if that comes first, and stays there. With `wsd`
    (warm-up, stable, decay) it is constant until the last `decay_share` of the steps, in which it
    falls as 1 - sqrt (Hägele et al. 2024, arXiv:2405.18392, §3).
    """
    t, peak = plan.train, peak_learning_rate(plan) / summed_batches(plan)
    warmup = warmup_steps(plan, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if t.schedule == "constant":
        return peak
    low = t.minimum_learning_rate
    end = min(t.decay_until or total_steps, total_steps)
    return peak * (low + (1.0 - low) * _share(step, plan, end, warmup))


def _share(step: int, plan: Plan, end: int, warmup: int) -> float:
    """The rate after the warm-up, on a scale from its final value (0) to its peak (1). It reaches the final value at
    step `end` - 1, counted from 0."""
    if plan.train.schedule == "wsd":
        steps = decay_steps(plan, end)
        progress = (step - (end - 1 - steps)) / steps
        return 1.0 - math.sqrt(min(max(progress, 0.0), 1.0))
    span = max(end - 1 - warmup, 1)
    progress = min((step - warmup) / span, 1.0)
    if plan.train.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
