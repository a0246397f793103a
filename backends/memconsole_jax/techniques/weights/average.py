"""The moving average of the trained weights, as `memconsole_trainer.techniques.average` specifies.

It is float32 and updated inside the compiled step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array


def first(weights: dict[str, Array]) -> dict[str, Array]:
    """The average before the first step. It has its own buffers, because weights and average are
    both donated."""
    return {name: jnp.array(w, jnp.float32, copy=True) for name, w in weights.items()}


def followed(average: Any, weights: dict[str, Array], share: Array) -> Any:
    """The average after a step; None if there is none. XLA overwrites the old one."""
    if average is None:
        return None
    return {n: a + share * (weights[n].astype(jnp.float32) - a) for n, a in average.items()}
