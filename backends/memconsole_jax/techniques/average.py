"""The moving average of the trained weights, as `memconsole_trainer.techniques.average` specifies: float32, within the step."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array


def first(weights: dict[str, Array]) -> dict[str, Array]:
    """The average before the first step: buffers of its own, because both are donated."""
    return {name: jnp.array(w, jnp.float32, copy=True) for name, w in weights.items()}


def followed(average: Any, weights: dict[str, Array], share: Array) -> Any:
    """The average behind a step; None where there is none. XLA writes it over the old one."""
    if average is None:
        return None
    return {n: a + share * (weights[n].astype(jnp.float32) - a) for n, a in average.items()}
