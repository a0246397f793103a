"""A mixture of experts in place of a block's MLP: a router picks some of many MLPs for each token
(Shazeer et al. 2017, arXiv:1701.06538), as in Mixtral, Qwen3 MoE, OLMoE and Granite MoE.

Pairs of a token and one of its experts are sorted by expert. A loop then takes one expert after
another, and tiles of equally many of its pairs. So shapes are static, and no expert computes rows
of another (compare MegaBlocks, Gale et al. 2022, arXiv:2211.15841). Only one expert's matrices at a
time exist in the compute dtype, and decoded if they are stored as codes. `jax.lax.ragged_dot` is no
help: XLA expands it to products of all rows with all experts, for CPUs, NVIDIA GPUs and TPUs.

Letters in shapes: B batch, T sequence, C hidden, N = B·T tokens, E experts, F intermediate size of
one expert, K experts that each token goes to, R rows of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import custom_vjp_primal_tree_values

from memconsole.plan.models.architecture import Architecture
from memconsole_jax import target
from memconsole_jax.layout.mesh import shard_gradient, shard_map_rows
from memconsole_jax.models.balance import balanced
from memconsole_jax.models.layers import Linear, RowsOf, gate_activation

FEWEST_ROWS, MOST_ROWS = 64, 512
"""Rows of a tile: half of the tokens that an expert gets on average, within these limits. Smaller tiles are slow, because a
product of few rows is. Larger tiles waste more rows that belong to no pair. Only the CPU's limits are measured."""
CPU_MOST_ROWS = 256
"""The same on a CPU, by `tests/bench/experts.py`: 64 rows take 5 to 10 % longer."""

Stored = Any
"""The arrays that hold the matrices gate, up and down, in this order. Each is one weight, or codes and scales."""
GATE, UP, DOWN = range(3)


class Experts(nnx.Module):
    """The weighted sum of the outputs ``down(silu(gate(x)) · up(x))`` of each token's K experts: (B, T, C) -> (B, T, C) in
    the dtype of x.

    A token goes to the K experts with the largest softmax of the router's logits. That softmax gives the weights of the
    sum, the experts' shares, which may be divided by their sum. The matrices of all experts are stacked by rows: `gate`
    and `up` are (E·F, C), `down` is (E·C, F).
    """

    def __init__(self, a: Architecture) -> None:
        self.experts, self.experts_per_token = a.experts, a.experts_per_token
        self.intermediate_size = a.intermediate_size
        self.normalized_shares, self.activation = a.normalized_shares, a.activation
        self.router = Linear(a.hidden_size, a.experts, bias=False)
        self.gate = Linear(a.hidden_size, a.experts * a.intermediate_size, bias=False)
        self.up = Linear(a.hidden_size, a.experts * a.intermediate_size, bias=False)
        self.down = Linear(a.intermediate_size, a.experts * a.hidden_size, bias=False)

    def __call__(self, x: Array) -> Array:
        layers = self.gate, self.up, self.down
        rows = tuple(layer.rows for layer in layers)
        settings = _Settings(
            self.experts,
            self.experts_per_token,
            self.intermediate_size,
            self.normalized_shares,
            self.activation,
            rows,
        )
        logits = balanced(self.router(x), self.experts_per_token)
        return _mixture(settings, x, logits, tuple(layer.stored for layer in layers))


class _Settings(NamedTuple):
    """What does not depend on the arrays."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    normalized_shares: bool
    activation: str
    rows: tuple[RowsOf, ...]
    """`Linear.rows` of gate, up and down."""

    def tile(self, tokens: int) -> int:
        """Rows of a tile: a power of two, or all tokens if they are fewer."""
        most = CPU_MOST_ROWS if target.kind() == "cpu" else MOST_ROWS
        half = max(1, tokens * self.experts_per_token // self.experts // 2)
        return min(tokens, most, max(FEWEST_ROWS, 1 << (half - 1).bit_length()))

    def matrix(self, which: int, stored: Stored, expert: Array, like: Array) -> Callable[[], Array]:
        """A function that returns `GATE` or `UP` (F, C) or `DOWN` (C, F) of one expert, in the dtype of `like` (N, C)."""
        size = like.shape[1] if which == DOWN else self.intermediate_size
        return self.rows[which](stored[which], expert * size, size, like.dtype)

    def shares(self, logits: Array, picks: Array) -> Array:
        """The shares (N, K), fp32, of each token's experts `picks` (N, K), from the router's logits (N, E)."""
        every = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        shares = jnp.take_along_axis(every, picks, axis=-1)
        return (
            shares / jnp.sum(shares, axis=-1, keepdims=True) if self.normalized_shares else shares
        )


class _Tile(NamedTuple):
    """Some consecutive pairs of one expert. The last rows of a tile may belong to no pair."""

    begin: Array
    """The index of its first pair among all pairs."""
    tokens: Array
    """The pairs' tokens (R,), in rising order."""
    is_pair: Array
    """Which rows belong to a pair (R,)."""

    def rows_of_tokens(self, x: Array) -> Array:
        """The rows (R, C) of the tile's tokens in x (N, C)."""
        return x.at[self.tokens].get(mode="promise_in_bounds")

    def rows_of_pairs(self, pairs: Array) -> Array:
        """The rows (R, ...) of the tile in an array of all pairs (N·K + R, ...)."""
        return lax.dynamic_slice_in_dim(pairs, self.begin, len(self.tokens))

    def set_pairs(self, pairs: Array, rows: Array) -> Array:
        """`pairs` (N·K + R, ...) with the rows of this tile (R, ...). Rows that belong to no pair are overwritten by the
        next tile, which begins where the pairs of this one end."""
        return lax.dynamic_update_slice_in_dim(pairs, rows.astype(pairs.dtype), self.begin, 0)

    def add_to_tokens(self, total: Array, rows: Array) -> Array:
        """`total` (N, C) plus the rows (R, C) of this tile, each at its token. A token has one pair with an expert, so
        nothing is added to a row twice."""
        beyond = len(total) + jnp.arange(len(rows))
        at = jnp.where(self.is_pair, self.tokens, beyond)
        return total.at[at].add(rows, mode="drop", unique_indices=True, indices_are_sorted=True)


class _Pairs(NamedTuple):
    """The pairs of a token and one of its experts, sorted by expert and then by token."""

    order: Array
    """For each pair (N·K,), its index in the flat array of picks (N, K)."""
    tokens: Array
    """The pairs' tokens (N·K + R,), padded with zeros."""
    bounds: Array
    """The index of each expert's first pair, and the number of pairs: (E + 1,)."""
    tile_rows: int
    """R."""

    @classmethod
    def of(cls, settings: _Settings, picks: Array, order: Array) -> _Pairs:
        """The pairs of `picks` (N, K), each token's experts, sorted by `order` (N·K,)."""
        rows = settings.tile(len(picks))
        experts = picks.reshape(-1)[order]
        bounds = jnp.searchsorted(experts, jnp.arange(settings.experts + 1)).astype(jnp.int32)
        return cls(order, _padded(order // settings.experts_per_token, rows), bounds, rows)

    def for_each_expert(self, expert: Callable[..., Any], carry: Any) -> Any:
        """Run ``carry = expert(number, for_each_tile, carry)`` for every expert that has pairs. In it,
        ``for_each_tile(step, carry)`` runs ``carry = step(tile, carry)`` for each of the expert's tiles, and returns the
        last carry."""
        idle = self.bounds[1:] == self.bounds[:-1]
        busy = jnp.argsort(idle, stable=True)

        def one_expert(index: Array, carry: Any) -> Any:
            number = busy[index]
            begin, end = self.bounds[number], self.bounds[number + 1]

            def for_each_tile(step: Callable[..., Any], carry: Any) -> Any:
                def one_tile(index: Array, carry: Any) -> Any:
                    return step(self._tile(begin + index * self.tile_rows, end), carry)

                return lax.fori_loop(0, -(-(end - begin) // self.tile_rows), one_tile, carry)

            return expert(number, for_each_tile, carry)

        return lax.fori_loop(0, len(idle) - jnp.sum(idle), one_expert, carry)

    def _tile(self, begin: Array, end: Array) -> _Tile:
        tokens = lax.dynamic_slice_in_dim(self.tokens, begin, self.tile_rows)
        return _Tile(begin, tokens, begin + jnp.arange(self.tile_rows) < end)


def _padded(x: Array, rows: int) -> Array:
    """x (N·K,) with so many zeros after it."""
    return jnp.pad(x, (0, rows))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixture(settings: _Settings, x: Array, logits: Array, stored: Stored) -> Array:
    """The mixture (B, T, C) of x for the router's logits (B, T, E). The outputs of gate and up are kept for the backward
    pass, which computes their activations again."""
    return _outputs(settings, x, logits, stored)[0]


def _outputs(settings: _Settings, *arrays: Any) -> Any:
    """The mixture (B, T, C), the outputs of gate and up, each (N·K + R, F), each token's experts (N, K) and the order of the
    pairs (N·K,). Each of several devices sorts its own rows."""

    def of_rows(x: Array, logits: Array, stored: Stored) -> tuple[tuple[()], Any]:
        shape = x.shape
        x, logits = x.reshape(-1, shape[-1]), logits.reshape(-1, settings.experts)
        picks = lax.top_k(logits, settings.experts_per_token)[1]
        order = jnp.argsort(picks.reshape(-1), stable=True)
        pairs = _Pairs.of(settings, picks, order)
        shares = _padded(settings.shares(logits, picks).reshape(-1)[order], pairs.tile_rows)

        gates_ups = _gates_ups(settings, x, stored, pairs)
        y = _combined(settings, x, stored, pairs, gates_ups, shares).astype(x.dtype)
        return (), (y.reshape(shape), gates_ups, picks, order)

    *split, stored = arrays
    return shard_map_rows(of_rows, tuple(split), (stored,))[1]


def _gates_ups(settings: _Settings, x: Array, stored: Stored, pairs: _Pairs) -> tuple[Array, Array]:
    """The outputs of gate and up, each (N·K + R, F), for the tokens x (N, C)."""

    def expert(number: Array, for_each_tile: Callable[..., Any], carry: Any) -> Any:
        matrices = [settings.matrix(which, stored, number, x) for which in (GATE, UP)]

        def step(tile: _Tile, carry: Any) -> Any:
            rows = tile.rows_of_tokens(x)
            return tuple(
                tile.set_pairs(outputs, rows @ matrix().T)
                for outputs, matrix in zip(carry, matrices, strict=True)
            )

        return for_each_tile(step, carry)

    zeros = jnp.zeros((len(pairs.tokens), settings.intermediate_size), x.dtype)
    outputs: tuple[Array, Array] = pairs.for_each_expert(expert, (zeros, zeros))
    return outputs


def _combined(
    settings: _Settings,
    x: Array,
    stored: Stored,
    pairs: _Pairs,
    gates_ups: tuple[Array, Array],
    shares: Array,
) -> Array:
    """The mixture (N, C) in fp32, from the outputs of gate and up and the shares (N·K + R,) of the pairs. It has a loop of
    its own, so that a checkpointed block does not run it again."""

    def expert(number: Array, for_each_tile: Callable[..., Any], y: Array) -> Any:
        down = settings.matrix(DOWN, stored, number, x)

        def step(tile: _Tile, y: Array) -> Array:
            gate, up = (tile.rows_of_pairs(outputs) for outputs in gates_ups)
            hidden = gate_activation(gate, up, settings.activation)
            share = tile.rows_of_pairs(shares)[:, None]
            return tile.add_to_tokens(y, share * _einsum_fp32("rf,cf->rc", hidden, down()))

        return for_each_tile(step, y)

    y: Array = pairs.for_each_expert(expert, jnp.zeros(x.shape, jnp.float32))
    return y


def _einsum_fp32(axes: str, *operands: Array) -> Array:
    """`jnp.einsum` with fp32 sums and results."""
    return jnp.einsum(axes, *operands, preferred_element_type=jnp.float32)


def _mixture_forward(settings: _Settings, *arrays: Any) -> tuple[Array, Any]:
    wanted = any(array.perturbed for array in jax.tree.leaves(arrays[2]))
    x, logits, stored = custom_vjp_primal_tree_values(arrays)
    in_codes = any(jnp.issubdtype(array.dtype, jnp.integer) for array in jax.tree.leaves(stored))
    trained = wanted and not in_codes
    y, gates_ups, picks, order = _outputs(settings, x, logits, stored)
    gates_ups = checkpoint_name(gates_ups, "product")
    return y, (x, logits, stored, gates_ups, picks, order, () if trained else None)


def _mixture_backward(
    settings: _Settings, residuals: Any, gradient: Array
) -> tuple[Array, Array, Any]:
    """Gradients of x, of the router's logits, and of the matrices if they are trained.

    With q = (gradient of the output) @ W_down, the gradient of a share is the inner product of q and the input of W_down.
    It needs no output of W_down.
    """
    x, logits, stored, gates_ups, picks, order, trained = residuals

    def of_rows(
        gradient: Array, x: Array, logits: Array, gates: Array, ups: Array, *rest: Any
    ) -> tuple[Any, Any]:
        picks, order, stored = rest
        shapes = x.shape, logits.shape
        x, gradient = (array.reshape(-1, x.shape[-1]) for array in (x, gradient))
        pairs = _Pairs.of(settings, picks, order)
        shares, pull = jax.vjp(
            lambda y: settings.shares(y, picks), logits.reshape(-1, settings.experts)
        )
        arrays = _PairArrays(
            x, gradient, gates, ups, _padded(shares.reshape(-1)[order], pairs.tile_rows)
        )

        def expert(number: Array, for_each_tile: Callable[..., Any], carry: Any) -> Any:
            matrices = tuple(settings.matrix(n, stored, number, x) for n in (GATE, UP, DOWN))
            step = partial(_add_tile_gradients, settings, arrays, matrices)
            sums, stored_grads = carry
            if stored_grads is None:
                return for_each_tile(step, (sums, None))[0], None
            zeros = tuple(jnp.zeros(m().shape, jnp.float32) for m in matrices)
            sums, matrix_grads = for_each_tile(step, (sums, zeros))
            return sums, tuple(
                lax.dynamic_update_slice_in_dim(t, g.astype(t.dtype), number * len(g), 0)
                for t, g in zip(stored_grads, matrix_grads, strict=True)
            )

        stored_grads = None if trained is None else jax.tree.map(jnp.zeros_like, stored)
        share_grads = jnp.zeros(len(pairs.tokens))
        carry = (jnp.zeros(x.shape, jnp.float32), share_grads), stored_grads
        (x_grad, share_grads), stored_grads = pairs.for_each_expert(expert, carry)
        share_grad = (
            jnp.zeros(len(order)).at[order].set(share_grads[: len(order)], unique_indices=True)
        )
        (logits_grad,) = pull(share_grad.reshape(picks.shape))
        x_grad = x_grad.astype(x.dtype).reshape(shapes[0])
        return stored_grads, (x_grad, logits_grad.reshape(shapes[1]))

    split = gradient, x, logits, *gates_ups, picks, order
    stored_grads, (x_grad, logits_grad) = shard_map_rows(of_rows, split, (stored,))
    if stored_grads is not None:
        stored_grads = jax.tree.map(shard_gradient, stored_grads)
    return x_grad, logits_grad, stored_grads


class _PairArrays(NamedTuple):
    """What the backward pass reads of the tokens and of the pairs."""

    x: Array
    """(N, C)."""
    gradient: Array
    """That of the mixture (N, C)."""
    gates: Array
    """(N·K + R, F)."""
    ups: Array
    """(N·K + R, F)."""
    shares: Array
    """(N·K + R,)."""


def _add_tile_gradients(
    settings: _Settings,
    arrays: _PairArrays,
    matrices: tuple[Callable[[], Array], ...],
    tile: _Tile,
    carry: Any,
) -> Any:
    """Add what one tile gives to the gradients of x (N, C) and of the expert's matrices, unless these are None, and set
    those of its pairs' shares (N·K + R,). `carry` is ((x, shares), matrices), and so is the result."""
    gate, up, down = matrices
    (x_grad, share_grads), matrix_grads = carry
    dtype = arrays.x.dtype
    rows, slope = tile.rows_of_tokens(arrays.x), tile.rows_of_tokens(arrays.gradient)
    hidden, pull = jax.vjp(
        partial(gate_activation, name=settings.activation),
        tile.rows_of_pairs(arrays.gates),
        tile.rows_of_pairs(arrays.ups),
    )
    share = jnp.where(tile.is_pair, tile.rows_of_pairs(arrays.shares), 0)[:, None]
    hidden_grad = _einsum_fp32("rc,cf->rf", slope, down())  # without the share
    share_grads = tile.set_pairs(share_grads, jnp.sum(hidden_grad * hidden, axis=1))
    gate_grad, up_grad = pull((share * hidden_grad).astype(dtype))
    rows_grad = _einsum_fp32("rf,fc->rc", gate_grad, gate())
    rows_grad = rows_grad + _einsum_fp32("rf,fc->rc", up_grad, up())
    if matrix_grads is not None:
        slope = (share * slope).astype(dtype)
        factors = (gate_grad, rows), (up_grad, rows), (slope, hidden)
        matrix_grads = tuple(
            total + _einsum_fp32("ro,ri->oi", *both)
            for total, both in zip(matrix_grads, factors, strict=True)
        )
    return (tile.add_to_tokens(x_grad, rows_grad), share_grads), matrix_grads


_mixture.defvjp(_mixture_forward, _mixture_backward, symbolic_zeros=True)
