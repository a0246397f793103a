"""Weights kept only in bfloat16, as `memconsole_trainer.techniques.rounding` specifies.

Rounding is an elementwise function of the new weight, the step and the element's index. XLA fuses
it into the update, so the random bits never exist as an array. The price is repeated work: four
elements share their random words, and each of them computes the words again.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole_jax.layout.stacking import stacks
from memconsole_trainer.techniques.rounding import BLOCK, LANES, is_rounded, threefry


class Rounding:
    """The rounded weights of one plan's model, and the keys of their tensors."""

    def __init__(self, plan: Plan, model: Model) -> None:
        seed = plan.train.seed
        self._seed = np.uint32(seed % 2**32), np.uint32(seed >> 32 & 0xFFFFFFFF)
        index = {p.name: i for i, p in enumerate(model.parameters())}
        self._indices = {
            name: (np.array([index[p.name] for p in s.members], np.uint32), s.layered)
            for name, s in stacks(model).items()
            if is_rounded(plan, s.members[0])
        }

    def __call__(
        self, name: str, wide: Array, dtype: Any, step: Any, layer: Array | None = None
    ) -> Array:
        """Round the new float32 values of weight `name`, or of one `layer` (1, …) of it, to
        bfloat16, and store them as `dtype`, which may be float32. Values of a weight that the plan
        does not round are returned unchanged. `step` is the step's number, a uint32 scalar."""
        if name not in self._indices:
            return wide
        indices, layered = self._indices[name]
        if layered and layer is not None:
            indices = jnp.asarray(indices)[layer][None]
        keys = threefry(self._seed, (jnp.full(indices.shape, step), jnp.asarray(indices)))
        shape = wide.shape[1:] if layered else wide.shape
        spread = (-1,) + (1,) * len(shape)
        bits = random_bits((keys[0].reshape(spread), keys[1].reshape(spread)), (1, *shape))
        words = lax.bitcast_convert_type(wide, jnp.uint32).reshape(bits.shape) + bits
        upper = (words & jnp.uint32(0xFFFF0000)).reshape(wide.shape)
        return lax.bitcast_convert_type(upper, jnp.float32).astype(dtype)


def random_bits(key: tuple[Array, Array], shape: tuple[int, ...], start: Array | int = 0) -> Array:
    """The 16 random bits, as uint32, of each element of a tensor of `shape`, or of the elements
    from `start` of a larger tensor. Broadcasts over keys."""
    place = jnp.full(shape, start, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        place = place + lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
        stride *= shape[axis]
    counter = place // BLOCK * LANES + place % LANES
    plane = place // LANES % 4
    x, y = threefry(key, (counter, jnp.zeros_like(counter)))
    word = jnp.where(plane < 2, x, y)
    return jnp.where(plane % 2 == 0, word & 0xFFFF, word >> 16)
