"""Dropout inside the layers of a model; see `memconsole_trainer.techniques.dropout`.

The random bits of each micro-batch of a training step are one more array of the batch. While a block is traced, the
context `active` gives these bits to its layers, and each layer derives its own bits from them. Outside of this
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
_LEVELS = 2**16
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
        rates = cls(t.dropout, t.attention_dropout, plan.optimize.lora_dropout)
        return rates if drops(plan) else None


class _Context:
    """The random bits of the layer that is traced, and how many of its dropouts have taken some."""

    def __init__(self, rates: Rates, bits: Array) -> None:
        self.rates, self._bits, self._taken = rates, bits, 0

    def next_bits(self) -> Array:
        """The bits of the layer's next dropout, uint32 (2,)."""
        self._taken += 1
        key = jax.random.fold_in(jax.random.wrap_key_data(self._bits), self._taken)
        return jax.random.key_data(key)


_contexts: list[_Context] = []
"""The contexts that are entered, the innermost last."""


@contextmanager
def active(rates: Rates | None, bits: Array | None) -> Iterator[None]:
    """A context of tracing in which layers drop numbers by `bits`, uint32 (2,); without these, nothing is dropped."""
    if rates is None or bits is None:
        yield
        return
    _contexts.append(_Context(rates, bits))
    try:
        yield
    finally:
        _contexts.pop()


def bits_of_step(plan: Plan, step: int) -> np.ndarray:
    """The random bits of a step's micro-batches, uint32 (A, 2)."""
    keys = [key_of(plan.train.seed, step, n) for n in range(plan.optimize.accumulation_steps)]
    return np.array([(key >> 32, key % 2**32) for key in keys], np.uint32)


def for_layers(layers: int) -> Array | None:
    """The random bits of each layer, uint32 (L, 2); None outside of `active`."""
    if not _contexts:
        return None
    key = jax.random.wrap_key_data(_contexts[-1].next_bits())
    return jax.random.key_data(jax.random.split(key, layers))


def current_rates() -> Rates | None:
    """The rates of `active`; None outside of it. A layer that JAX may trace again in the backward pass must ask before:
    by then the context has ended."""
    return _contexts[-1].rates if _contexts else None


def residual(x: Array) -> Array:
    """Apply `train.dropout` to the embedded tokens, windows or items, or to an output that is added to the residual stream."""
    drawn = _next_bits("residual")
    return x if drawn is None else dropped(x, *drawn)


def for_attention() -> tuple[Array, float] | None:
    """Random bits and rate of dropout on the attention weights; None if nothing is dropped."""
    return _next_bits("attention")


def adapter_product(x: Array, matrix: Array, product: Callable[[Array, Array], Array]) -> Array:
    """``product(dropped(x), matrix)`` of an adapter. Only x is saved for the backward pass, and the adapters that
    read x share it."""
    drawn = _next_bits("adapters")
    if drawn is None:
        return product(x, matrix)
    bits, rate = drawn

    def masked_product(x: Array, matrix: Array, bits: Array) -> Array:
        return product(masked(x, bits, rate), matrix)

    return recomputed(masked_product, (x, matrix), (bits,))


def _next_bits(where: str) -> tuple[Array, float] | None:
    """The bits of the next dropout and its rate, which is the field `where` of `Rates`; None if nothing is dropped."""
    if not _contexts:
        return None
    rate: float = getattr(_contexts[-1].rates, where)
    return (_contexts[-1].next_bits(), rate) if rate > 0 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dropped(x: Array, bits: Array, rate: float) -> Array:
    """x with numbers dropped at `rate` by the mask of `bits`. The backward pass draws the mask again."""
    return masked(x, bits, rate)


def masked(x: Array, bits: Array, rate: float) -> Array:
    """The same as `dropped`, but the backward pass saves the mask instead of drawing it again."""
    limit = round(rate * _LEVELS)
    kept = jax.random.bits(jax.random.wrap_key_data(bits), x.shape, jnp.uint16) >= limit
    return jnp.where(kept, x * (_LEVELS / (_LEVELS - limit)), 0).astype(x.dtype)


def _forward(x: Array, bits: Array, rate: float) -> tuple[Array, Array]:
    return masked(x, bits, rate), bits


def _backward(rate: float, bits: Array, gradient: Array) -> tuple[Array, None]:
    return masked(gradient, bits, rate), None


dropped.defvjp(_forward, _backward)
