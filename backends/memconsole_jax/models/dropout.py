"""Dropout inside the layers of a model; see `memconsole_trainer.techniques.dropout`.

The random bits of each micro-batch of a training step are one more array of the batch. While a block is traced, the
context `drawing` gives these bits to its layers, and each layer derives the bits of its own place. Outside of this
context the layers drop nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from memconsole.plan.plan import Plan
from memconsole_jax.models.recompute import recomputed
from memconsole_trainer.techniques.dropout import drops, key_of

BITS = "dropout"
"""Name of the random bits in a batch, uint32 (A, 2)."""
_STEPS = 2**16
"""Probabilities are rounded to multiples of 1 / this, so that 16 random bits decide whether a number is dropped."""


@dataclass(frozen=True)
class Rates:
    """The plan's probabilities."""

    residual: float
    attention: float
    adapters: float

    @classmethod
    def of(cls, plan: Plan) -> Rates | None:
        """None if the plan drops nothing."""
        t = plan.train
        found = cls(t.dropout, t.attention_dropout, plan.optimize.lora_dropout)
        return found if drops(plan) else None


class _Drawing:
    """The state of tracing a layer: its random bits, and how many places have taken some."""

    def __init__(self, rates: Rates, bits: Array) -> None:
        self.rates, self._bits, self._places = rates, bits, 0

    def take(self) -> Array:
        """The bits of the next place, uint32 (2,)."""
        self._places += 1
        key = jax.random.fold_in(jax.random.wrap_key_data(self._bits), self._places)
        return jax.random.key_data(key)


_now: list[_Drawing] = []


@contextmanager
def drawing(rates: Rates | None, bits: Array | None) -> Iterator[None]:
    """A context of tracing in which layers drop numbers by `bits`, uint32 (2,); nothing without them."""
    if rates is None or bits is None:
        yield
        return
    _now.append(_Drawing(rates, bits))
    try:
        yield
    finally:
        _now.pop()


def bits_of(plan: Plan, step: int) -> np.ndarray:
    """The random bits of a step's micro-batches, uint32 (A, 2)."""
    keys = [key_of(plan.train.seed, step, n) for n in range(plan.optimize.accumulation_steps)]
    return np.array([(key >> 32, key % 2**32) for key in keys], np.uint32)


def for_layers(layers: int) -> Array | None:
    """The random bits of each layer, uint32 (L, 2); None outside of `drawing`."""
    if not _now:
        return None
    key = jax.random.wrap_key_data(_now[-1].take())
    return jax.random.key_data(jax.random.split(key, layers))


def rates_now() -> Rates | None:
    """The rates of `drawing`; None outside of it. A layer that JAX may trace again in the backward pass must ask before:
    by then the context has ended."""
    return _now[-1].rates if _now else None


def residual(x: Array) -> Array:
    """Apply `train.dropout` to the embedded tokens, windows or items, or to an output that is added to the residual stream."""
    return dropped(x, _now[-1].take(), _now[-1].rates.residual) if _drops("residual") else x


def attention() -> tuple[Array, float] | None:
    """Random bits and rate of dropout on the attention weights; None if nothing is dropped."""
    return (_now[-1].take(), _now[-1].rates.attention) if _drops("attention") else None


def reduced(x: Array, matrix: Array, product: Callable[[Array, Array], Array]) -> Array:
    """``product(dropped(x), matrix)`` of an adapter. It keeps x alone for its backward pass, which the adapters that
    read x share."""
    if not _drops("adapters"):
        return product(x, matrix)
    bits, rate = _now[-1].take(), _now[-1].rates.adapters

    def again(x: Array, matrix: Array, bits: Array) -> Array:
        return product(masked(x, bits, rate), matrix)

    return recomputed(again, (x, matrix), (bits,))


def _drops(where: str) -> bool:
    return bool(_now) and getattr(_now[-1].rates, where) > 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dropped(x: Array, bits: Array, rate: float) -> Array:
    """x with numbers dropped at `rate` by the mask of `bits`. The backward pass draws the mask again."""
    return masked(x, bits, rate)


def masked(x: Array, bits: Array, rate: float) -> Array:
    """The same as `dropped`, but the mask is kept for the backward pass."""
    limit = round(rate * _STEPS)
    kept = jax.random.bits(jax.random.wrap_key_data(bits), x.shape, jnp.uint16) >= limit
    return jnp.where(kept, x * (_STEPS / (_STEPS - limit)), 0).astype(x.dtype)


def _forward(x: Array, bits: Array, rate: float) -> tuple[Array, Array]:
    return masked(x, bits, rate), bits


def _backward(rate: float, bits: Array, gradient: Array) -> tuple[Array, None]:
    return masked(gradient, bits, rate), None


dropped.defvjp(_forward, _backward)
