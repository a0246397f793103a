"""Mixed precision: float32 master weights, 16-bit compute (Micikevicius et al. 2018).

The decoder casts each weight where it is used, inside the block, so 16-bit copies live one block at a
time; norms, softmax, loss and the optimizer stay float32. bf16 has float32's range and needs no loss
scaling; fp16 does, and is not trained here.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from memconsole.plan.plan import Plan, PlanError


def compute_dtype(plan: Plan) -> Any:
    """The dtype of activations and matmuls. Raises `PlanError` for fp16."""
    precision = plan.optimize.precision
    if precision in ("fp16", "bf16-sr"):
        raise PlanError(
            f"optimize.precision = {precision}: the jax backend trains fp32 | bf16",
            "optimize.precision",
        )
    return jnp.bfloat16 if precision == "bf16" else jnp.float32
