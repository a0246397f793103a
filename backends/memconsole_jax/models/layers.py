"""The layers that models are built of: matrices, embeddings, norms and the MLP, with custom
gradients.

Letters in shapes: B batch, T sequence, C hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from memconsole_jax import target
from memconsole_jax.layout.mesh import all_gather, shard_gradient
from memconsole_jax.models.recompute import recomputed

RowsOf = Callable[[Any, Array, int, Any], Callable[[], Array]]
"""What holds a matrix, the first of some rows, their number and a dtype -> a function that gives these rows."""


class Linear(nnx.Module):
    """``x @ W.T + b`` in the dtype of x: (B, inputs) -> (B, outputs), or (B, T, inputs) -> (B, T, outputs)."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None

    def __call__(self, x: Array) -> Array:
        return product(x, self.weight[...], None if self.bias is None else self.bias[...])

    @property
    def stored(self) -> Array:
        """What holds the matrix, (outputs, inputs)."""
        return self.weight[...]

    @property
    def rows(self) -> RowsOf:
        """Takes some rows out of `stored`."""
        return _rows


def _rows(weight: Array, first: Array, count: int, dtype: Any) -> Callable[[], Array]:
    found = lax.dynamic_slice_in_dim(weight, first, count).astype(dtype)
    return lambda: found


class Embedding(nnx.Module):
    """A table of rows (rows, hidden)."""

    def __init__(self, rows: int, hidden: int) -> None:
        self.weight = nnx.Param(jnp.zeros((rows, hidden)))

    def __call__(self, indices: Array) -> Array:
        return looked_up(self.weight[...], indices)


@jax.custom_vjp
def looked_up(table: Array, indices: Array) -> Array:
    """Rows of a table (rows, hidden) in float32, because a frequent row's gradient is a sum of many
    terms."""
    return table[indices].astype(jnp.float32)


def _looked_up_forward(table: Array, indices: Array) -> tuple[Array, Any]:
    return looked_up(table, indices), (indices, jnp.zeros((0, table.shape[0]), table.dtype))


def _looked_up_backward(kept: Any, gradient: Array) -> tuple[Array, None]:
    indices, kind = kept
    shape = kind.shape[1], gradient.shape[-1]
    # The zeros depend on the gradient. Otherwise XLA would allocate them long before their use.
    zero = 0 * gradient.reshape(-1)[0]
    return jnp.full(shape, zero).at[indices].add(gradient).astype(kind.dtype), None


looked_up.defvjp(_looked_up_forward, _looked_up_backward)


class Norm(nnx.Module):
    """Layer norm if `centred`, else RMS norm (Zhang and Sennrich 2019), over the last axis, with
    statistics in float32. `offset` is added to the weight, which is then divided by `divisor`."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        centred: bool,
        offset: float = 0.0,
        bias: bool,
        divisor: float = 1.0,
    ) -> None:
        self.centred = centred
        self.eps = eps
        self.offset = offset
        self.divisor = divisor
        self.weight = nnx.Param(jnp.zeros((size,)))
        self.bias = nnx.Param(jnp.zeros((size,))) if bias else None

    def __call__(self, x: Array) -> Array:
        bias = None if self.bias is None else all_gather(self.bias[...])
        inputs = x, all_gather(self.weight[...]), bias
        if target.kind() == "cpu":
            return recomputed(self._normed, inputs)
        # Elsewhere XLA fuses all of it; the custom rule would keep a second x.
        return jax.checkpoint(self._normed, prevent_cse=False)(*inputs)

    def _normed(self, x: Array, weight: Array, bias: Array | None) -> Array:
        y = x.astype(jnp.float32)
        if self.centred:
            y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        weight = self.offset + weight
        y = y * (weight if self.divisor == 1.0 else weight / self.divisor)
        return (y if bias is None else y + bias).astype(x.dtype)


class Unnormed(nnx.Module):
    """In place of a norm: returns its input."""

    def __call__(self, x: Array) -> Array:
        return x


class MLP(nnx.Module):
    """Up, activation (gated: SwiGLU or GeGLU), down."""

    def __init__(
        self, hidden: int, intermediate: int, activation: str, *, gated: bool, bias: bool
    ) -> None:
        self.activation = activation
        self.gate = Linear(hidden, intermediate, bias) if gated else None
        self.up = Linear(hidden, intermediate, bias)
        self.down = Linear(intermediate, hidden, bias)

    def __call__(self, x: Array) -> Array:
        up = self.up(x)
        if self.gate is None:
            return self.down(activate(up, self.activation))
        return self.down(gated(self.gate(x), up, self.activation))


def activate(x: Array, name: str) -> Array:
    """SiLU or tanh-approximated GELU, in float32 as in torch's kernels. The backward pass keeps
    only x."""
    return recomputed(functools.partial(_activated, name), (x,))


def gated(gate: Array, up: Array, name: str) -> Array:
    """``activation(gate) · up``. The backward pass keeps only gate and up."""
    return recomputed(functools.partial(_gated, name), (gate, up))


def _activated(name: str, x: Array) -> Array:
    return _ACTIVATIONS[name](x.astype(jnp.float32)).astype(x.dtype)


def _gated(name: str, gate: Array, up: Array) -> Array:
    return (_ACTIVATIONS[name](gate.astype(jnp.float32)) * up).astype(up.dtype)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def product(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """``x @ W.T + b`` in the dtype of x: (B, C), or (B, T, ...), whose last axes are joined.

    For the backward pass, only x and the weights as they were passed are kept: no cast, transposed or gathered copy
    of a layer's weights, and no second copy of the attention output."""
    return checkpoint_name(_product(x, weight, bias), "product")


@jax.custom_vjp
def _product(x: Array, weight: Array, bias: Array | None) -> Array:
    y = jnp.einsum("...i,oi->...o", _joined(x), all_gather(weight.astype(x.dtype)))
    return y if bias is None else y + all_gather(bias.astype(x.dtype))


def _product_forward(x: Array, weight: Array, bias: Array | None) -> tuple[Array, Any]:
    return _product(x, weight, bias), (x, weight, bias)


def _product_backward(kept: Any, gradient: Array) -> tuple[Array, Array, Array | None]:
    x, weight, bias = kept
    back = jnp.einsum("...o,oi->...i", gradient, all_gather(weight.astype(x.dtype)))
    # As matrices: XLA on a CPU makes a transposed copy before it contracts two axes at once.
    rows, slopes = _joined(x).reshape(-1, weight.shape[1]), gradient.reshape(-1, weight.shape[0])
    turned = jnp.einsum("no,ni->oi", slopes, rows)
    # The bias gradient is also a product: a sum would widen 16-bit gradients a second time.
    ones = jnp.ones(len(slopes), x.dtype)
    summed = None if bias is None else jnp.einsum("n,no->o", ones, slopes).astype(bias.dtype)
    of_bias = None if summed is None else shard_gradient(summed)
    return back.reshape(x.shape), shard_gradient(turned).astype(weight.dtype), of_bias


_product.defvjp(_product_forward, _product_backward)


def _joined(x: Array) -> Array:
    return x if x.ndim == 2 else x.reshape(*x.shape[:2], -1)
