"""Mixed precision: 16-bit compute (Micikevicius et al. 2018), norms, softmax, loss and optimizer in
float32.

The decoder casts each weight where it is used, inside the block, so 16-bit copies exist for one
block at a time. Weights stay float32 with bf16 and fp16; with bf16-sr, `rounding` keeps them in
bfloat16. fp16 needs loss scaling as `memconsole_trainer.techniques.loss_scale` specifies; the
compiled step decides whether to skip.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from memconsole.plan.plan import Plan
from memconsole_trainer.techniques import loss_scale

COMPUTE = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "bf16-sr": jnp.bfloat16,
    "fp16": jnp.float16,
}


def compute_dtype(plan: Plan) -> Any:
    """The dtype of activations and matmuls."""
    return COMPUTE[plan.optimize.precision]


def adapted(state: Array | None, finite: Array | None) -> Array | None:
    """The next value of `step.TrainState.precision`: the loss scale's state (3,), which depends on
    whether gradients were `finite`; or the next step's number; None if there is neither."""
    if state is None:
        return None
    if finite is None:
        return state + 1
    scale, good, skipped = state
    grown = finite & (good + 1 >= loss_scale.GROWTH_STEPS)
    more = jnp.minimum(scale * loss_scale.GROWTH, loss_scale.MOST)
    return jnp.stack(
        [
            jnp.where(finite, jnp.where(grown, more, scale), scale * loss_scale.BACKOFF),
            jnp.where(finite & ~grown, good + 1, 0.0),
            jnp.where(finite, skipped, skipped + 1),
        ]
    )


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` with state and arithmetic in float32, for any storage type of weights and
    gradients."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(weights: Any) -> Any:
        return inner.init(wide(weights))

    def update(gradients: Any, state: Any, weights: Any = None) -> tuple[Any, Any]:
        updates, after = inner.update(wide(gradients), state, wide(weights))
        return updates, after

    return optax.GradientTransformation(init, update)
