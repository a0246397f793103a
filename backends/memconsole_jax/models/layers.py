"""The layers that models are built of: matrices, embeddings, norms and the MLP, with custom
gradients.

Letters in shapes: B batch, T sequence, C hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from memconsole_jax import target
from memconsole_jax.layout.mesh import all_gather, shard_gradient
from memconsole_jax.models.recompute import recomputed
from memconsole_jax.models.tiles import in_tiles

RowsOf = Callable[[Any, Array, int, Any], Callable[[], Array]]
"""(stored matrix, first row, number of rows, dtype) -> a function that returns these rows."""


class Linear(nnx.Module):
    """``x @ W.T + b`` in the dtype of x: (B, inputs) -> (B, outputs), or (B, T, inputs) -> (B, T, outputs)."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None

    def __call__(self, x: Array) -> Array:
        return product(x, self.weight[...], None if self.bias is None else self.bias[...])

    @property
    def stored(self) -> Array:
        """The matrix as it is stored, (outputs, inputs)."""
        return self.weight[...]

    @property
    def rows(self) -> RowsOf:
        """Slices rows out of `stored`."""
        return _slice_rows


def _slice_rows(weight: Array, first: Array, count: int, dtype: Any) -> Callable[[], Array]:
    rows = lax.dynamic_slice_in_dim(weight, first, count).astype(dtype)
    return lambda: rows


class Embedding(nnx.Module):
    """A table of rows (rows, hidden)."""

    def __init__(self, rows: int, hidden: int) -> None:
        self.weight = nnx.Param(jnp.zeros((rows, hidden)))

    def __call__(self, indices: Array) -> Array:
        return lookup(self.weight[...], indices)


@jax.custom_vjp
def lookup(table: Array, indices: Array) -> Array:
    """The rows `indices` of a table (rows, hidden) in float32, because a frequent row's gradient is a sum of many
    terms."""
    return table[indices].astype(jnp.float32)


def _lookup_forward(table: Array, indices: Array) -> tuple[Array, Any]:
    # An empty array tells the backward pass the number of rows and the dtype, without keeping the table.
    return lookup(table, indices), (indices, jnp.zeros((0, table.shape[0]), table.dtype))


def _lookup_backward(saved: Any, gradient: Array) -> tuple[Array, None]:
    indices, empty = saved
    shape = empty.shape[1], gradient.shape[-1]
    # The zeros depend on the gradient. Otherwise XLA would allocate them long before their use.
    zero = 0 * gradient.reshape(-1)[0]
    return jnp.full(shape, zero).at[indices].add(gradient).astype(empty.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


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
            return recomputed(self._normalize, inputs)
        # Elsewhere XLA fuses all of it; the custom rule would keep a second x.
        return jax.checkpoint(self._normalize, prevent_cse=False)(*inputs)

    def _normalize(self, x: Array, weight: Array, bias: Array | None) -> Array:
        y = x.astype(jnp.float32)
        if self.centred:
            y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        weight = self.offset + weight
        y = y * (weight if self.divisor == 1.0 else weight / self.divisor)
        return (y if bias is None else y + bias).astype(x.dtype)


class Identity(nnx.Module):
    """Returns its input. It is in place of a norm that a model does not have."""

    def __call__(self, x: Array) -> Array:
        return x


class Tiling(NamedTuple):
    """How an MLP is computed for a few tokens at a time."""

    most: int
    """Tokens of a tile."""
    adapters_only: bool
    """Whether all weights but those of adapters are frozen."""

    def trains(self, path: tuple[Any, ...], _: Any) -> bool:
        """Whether the weight at `path` has a gradient."""
        return not self.adapters_only or path[-1] in ("lora_a", "lora_b")


class MLP(nnx.Module):
    """Up, activation (gated: SwiGLU or GeGLU), down."""

    tiling: Tiling | None = None

    def __init__(
        self, hidden: int, intermediate: int, activation: str, *, gated: bool, bias: bool
    ) -> None:
        self.activation = activation
        self.gate = Linear(hidden, intermediate, bias) if gated else None
        self.up = Linear(hidden, intermediate, bias)
        self.down = Linear(intermediate, hidden, bias)

    def __call__(self, x: Array) -> Array:
        tiling = self.tiling
        if tiling is None or x.ndim != 3 or x.shape[0] * x.shape[1] <= tiling.most:
            return self.whole(x)
        graph, trained, rest = nnx.split(self, tiling.trains, ...)

        def layer(x: Array, trained: Any, rest: Any) -> Array:
            mlp: MLP = nnx.merge(graph, trained, rest)
            return mlp.whole(x)

        return in_tiles(layer, tiling.most, x, trained, rest)

    def whole(self, x: Array) -> Array:
        """The MLP of all tokens at once."""
        up = self.up(x)
        if self.gate is None:
            return self.down(activate(up, self.activation))
        return self.down(gate_activation(self.gate(x), up, self.activation))


def activate(x: Array, name: str) -> Array:
    """SiLU or tanh-approximated GELU, in float32 as in torch's kernels. The backward pass keeps
    only x."""
    return recomputed(functools.partial(_activate, name), (x,))


def gate_activation(gate: Array, up: Array, name: str) -> Array:
    """``activation(gate) · up``. The backward pass keeps only gate and up."""
    return recomputed(functools.partial(_gate_activation, name), (gate, up))


def _activate(name: str, x: Array) -> Array:
    return _ACTIVATIONS[name](x.astype(jnp.float32)).astype(x.dtype)


def _gate_activation(name: str, gate: Array, up: Array) -> Array:
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


def _product_backward(saved: Any, gradient: Array) -> tuple[Array, Array, Array | None]:
    x, weight, bias = saved
    x_gradient = jnp.einsum("...o,oi->...i", gradient, all_gather(weight.astype(x.dtype)))
    # As matrices: XLA on a CPU makes a transposed copy before it contracts two axes at once.
    rows, gradients = _joined(x).reshape(-1, weight.shape[1]), gradient.reshape(-1, weight.shape[0])
    weight_gradient = shard_gradient(jnp.einsum("no,ni->oi", gradients, rows)).astype(weight.dtype)
    bias_gradient = None
    if bias is not None:
        # Also as a product: a sum would make fp32 copies of 16-bit gradients.
        ones = jnp.ones(len(gradients), x.dtype)
        summed = jnp.einsum("n,no->o", ones, gradients).astype(bias.dtype)
        bias_gradient = shard_gradient(summed)
    return x_gradient.reshape(x.shape), weight_gradient, bias_gradient


_product.defvjp(_product_forward, _product_backward)


def _joined(x: Array) -> Array:
    """(B, C), or (B, T, ...) with its last axes joined."""
    return x if x.ndim == 2 else x.reshape(*x.shape[:2], -1)
