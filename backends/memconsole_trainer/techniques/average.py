"""Exponential moving average of the trained weights (Polyak and Juditsky 1992): the specification
of both backends.

    average = average + share · (weights - average)        after each optimizer step that was not skipped

The average is fp32 and starts as the initial weights. share = 1 - min(decay, (1 + n) / (10 + n)) at
step n, counted from 0, so the influence of the initial weights fades soon (TensorFlow,
`tf.train.ExponentialMovingAverage`, num_updates). Evaluation, sampling and export use the average
instead of the trained weights. Only trained weights are averaged: adapters are, a frozen base is
not.
"""

from __future__ import annotations

from memconsole.plan.plan import Plan

PREFIX = "ema."
"""Prefix of the average's tensors in a checkpoint; the canonical name follows."""


def is_averaged(plan: Plan) -> bool:
    """Whether the plan keeps an average of the weights."""
    return plan.train.ema_decay > 0


def share(plan: Plan, step: int) -> float:
    """Share of the new weights in the average after optimizer step `step`, counted from 0."""
    return 1.0 - min(plan.train.ema_decay, (1 + step) / (10 + step))
