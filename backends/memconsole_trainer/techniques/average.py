"""The exponential moving average of the trained weights (Polyak and Juditsky 1992): what both backends follow.

    average = average + share · (weights - average)        after each optimizer step that was not skipped

in fp32, starting at the first weights, with share = 1 - min(decay, (1 + n) / (10 + n)) at step n, counted from 0:
early steps forget the first weights soon (TensorFlow, `tf.train.ExponentialMovingAverage`, num_updates). Evaluation,
sampling and export take the average in the trained weights' place; a frozen base has none, its adapters have.
"""

from __future__ import annotations

from memconsole.plan.plan import Plan

PREFIX = "ema."
"""What the average's tensors are called in a checkpoint, before their canonical names."""


def is_averaged(plan: Plan) -> bool:
    """Whether there is an average beside the weights."""
    return plan.train.ema_decay > 0


def share(plan: Plan, step: int) -> float:
    """How much of the new weights the average takes in behind optimizer step `step`, counted from 0."""
    return 1.0 - min(plan.train.ema_decay, (1 + step) / (10 + step))
