"""A mixture of experts in place of a block's MLP: a router picks some of many MLPs for each token
(Shazeer et al. 2017, arXiv:1701.06538), as in Mixtral, Qwen3 MoE, OLMoE and Granite MoE.

Pairs of a token and one of its experts are sorted by expert. A loop then takes one expert after
another, and tiles of equally many of its pairs. So shapes are static, and no expert computes rows
of another (compare MegaBlocks, Gale et al. 2022, arXiv:2211.15841). Only one expert's matrices at a
time exist in the compute dtype, and decoded if they are stored as codes. `jax.lax.ragged_dot` is no
help: XLA expands it to products of all rows with all experts, for CPUs, NVIDIA GPUs and TPUs.

Letters in shapes: B batch, T sequence, C hidden, N = B·T tokens, E experts, F inner width of one
expert, K experts that each token goes to, R rows of a tile.
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
from memconsole_jax.layout.mesh import on_own_rows, shared_out
from memconsole_jax.models.balance import balanced
from memconsole_jax.models.layers import Linear, RowsOf, gated

FEWEST_ROWS, MOST_ROWS = 64, 512
"""Rows of a tile: half of an expert's mean, within these limits. Products of few rows are slow, and of large tiles more
rows belong to no pair. Only the CPU's limits are measured."""
CPU_MOST_ROWS = 256
"""The same on a CPU, by `tests/bench/experts.py`: 64 rows take 5 to 10 % longer."""

Stored = Any
"""The arrays that hold the matrices gate, up and down: of each its weight, or its codes and scales."""
GATE, UP, DOWN = range(3)


class Experts(nnx.Module):
    """The weighted sum of the picked experts' ``down(silu(gate(x)) · up(x))``: (B, T, C) -> (B, T, C) in the dtype of x.

    A token's experts are those with the largest softmax of the router's outputs. That softmax gives their shares, which
    may be divided by their sum. Rows of one expert in `gate` and `up` (E·F, C) and `down` (E·C, F) follow those of another.
    """

    def __init__(self, a: Architecture) -> None:
        self.experts, self.picked, self.inner = a.experts, a.experts_per_token, a.intermediate_size
        self.normalized, self.activation = a.normalized_shares, a.activation
        self.router = Linear(a.hidden_size, a.experts, bias=False)
        self.gate = Linear(a.hidden_size, a.experts * self.inner, bias=False)
        self.up = Linear(a.hidden_size, a.experts * self.inner, bias=False)
        self.down = Linear(self.inner, a.experts * a.hidden_size, bias=False)

    def __call__(self, x: Array) -> Array:
        layers = self.gate, self.up, self.down
        rows = tuple(layer.rows for layer in layers)
        form = _Form(self.experts, self.picked, self.inner, self.normalized, self.activation, rows)
        logits = balanced(self.router(x), self.picked)
        return _mixed(form, x, logits, tuple(layer.stored for layer in layers))


class _Form(NamedTuple):
    """What does not depend on the arrays."""

    experts: int
    picked: int
    inner: int
    normalized: bool
    activation: str
    rows: tuple[RowsOf, ...]
    """`Linear.rows` of gate, up and down."""

    def tile(self, tokens: int) -> int:
        """Rows of a tile: a power of two, or all tokens if they are fewer."""
        most = CPU_MOST_ROWS if target.kind() == "cpu" else MOST_ROWS
        half = max(1, tokens * self.picked // self.experts // 2)
        return min(tokens, most, max(FEWEST_ROWS, 1 << (half - 1).bit_length()))

    def matrix(self, which: int, stored: Stored, expert: Array, like: Array) -> Callable[[], Array]:
        """A function that gives `GATE` or `UP` (F, C) or `DOWN` (C, F) of one expert, in the dtype of `like` (N, C)."""
        size = like.shape[1] if which == DOWN else self.inner
        return self.rows[which](stored[which], expert * size, size, like.dtype)

    def shares(self, logits: Array, picks: Array) -> Array:
        """Shares (N, K), fp32, of the picked experts, from the router's outputs (N, E)."""
        every = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        shares = jnp.take_along_axis(every, picks, axis=-1)
        return shares / jnp.sum(shares, axis=-1, keepdims=True) if self.normalized else shares


class _Tile(NamedTuple):
    """Some consecutive pairs of one expert. Its last rows may belong to no pair."""

    begin: Array
    """Place of the first pair."""
    tokens: Array
    """The pairs' tokens (R,), in rising order."""
    is_pair: Array
    """Which rows belong to a pair (R,)."""

    def taken(self, x: Array) -> Array:
        """The rows (R, C) of the tokens' array x (N, C)."""
        return x.at[self.tokens].get(mode="promise_in_bounds")

    def of(self, pairs: Array) -> Array:
        """The rows (R, ...) of an array of all pairs (N·K + R, ...)."""
        return lax.dynamic_slice_in_dim(pairs, self.begin, len(self.tokens))

    def put(self, pairs: Array, rows: Array) -> Array:
        """`pairs` (N·K + R, ...) with these rows. What is put after the last pair of the expert is replaced by the next
        tile, which begins there."""
        return lax.dynamic_update_slice_in_dim(pairs, rows.astype(pairs.dtype), self.begin, 0)

    def added(self, total: Array, rows: Array) -> Array:
        """`total` (N, C) with the rows of the pairs added to those of their tokens. A token has one pair with an expert, so
        no row is added to twice."""
        beyond = len(total) + jnp.arange(len(rows))
        at = jnp.where(self.is_pair, self.tokens, beyond)
        return total.at[at].add(rows, mode="drop", unique_indices=True, indices_are_sorted=True)


class _Pairs(NamedTuple):
    """The pairs of tokens and experts in the order of the experts, those of one expert in the order of the tokens."""

    places: Array
    """The places (N·K,) of the pairs in an array (N, K)."""
    tokens: Array
    """The pairs' tokens (N·K + R,), filled up."""
    bounds: Array
    """Where the pairs of each expert begin, (E + 1,)."""
    rows: int
    """R, those of a tile."""

    @classmethod
    def of(cls, form: _Form, picks: Array, places: Array) -> _Pairs:
        """The pairs of `picks` (N, K), whose order is `places`."""
        rows = form.tile(len(picks))
        experts = picks.reshape(-1)[places]
        bounds = jnp.searchsorted(experts, jnp.arange(form.experts + 1)).astype(jnp.int32)
        return cls(places, _filled(places // form.picked, rows), bounds, rows)

    def through(self, expert: Callable[..., Any], carry: Any) -> Any:
        """Run ``carry = expert(number, tiles, carry)`` for every expert that has pairs. There, ``tiles(step, carry)`` runs
        ``carry = step(tile, carry)`` for each of the expert's tiles."""
        idle = self.bounds[1:] == self.bounds[:-1]
        busy = jnp.argsort(idle, stable=True)

        def one(index: Array, carry: Any) -> Any:
            number = busy[index]
            begin, end = self.bounds[number], self.bounds[number + 1]

            def tiles(step: Callable[..., Any], carry: Any) -> Any:
                def of_tile(index: Array, carry: Any) -> Any:
                    return step(self._tile(begin + index * self.rows, end), carry)

                return lax.fori_loop(0, -(-(end - begin) // self.rows), of_tile, carry)

            return expert(number, tiles, carry)

        return lax.fori_loop(0, len(idle) - jnp.sum(idle), one, carry)

    def _tile(self, begin: Array, end: Array) -> _Tile:
        tokens = lax.dynamic_slice_in_dim(self.tokens, begin, self.rows)
        return _Tile(begin, tokens, begin + jnp.arange(self.rows) < end)


def _filled(x: Array, rows: int) -> Array:
    """x (N·K,) with so many zeros after it."""
    return jnp.pad(x, (0, rows))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(form: _Form, x: Array, logits: Array, stored: Stored) -> Array:
    """The mixture (B, T, C) of x for the router's outputs (B, T, E). The backward pass keeps the outputs of gate and up, and
    computes what is made of them again."""
    return _outputs(form, x, logits, stored)[0]


def _outputs(form: _Form, *arrays: Any) -> Any:
    """The mixture (B, T, C), the outputs of gate and up, each (N·K + R, F), the picks (N, K) and the places of the pairs
    (N·K,). Each of several devices sorts its own rows."""

    def of_rows(x: Array, logits: Array, stored: Stored) -> tuple[tuple[()], Any]:
        shape = x.shape
        x, logits = x.reshape(-1, shape[-1]), logits.reshape(-1, form.experts)
        picks = lax.top_k(logits, form.picked)[1]
        places = jnp.argsort(picks.reshape(-1), stable=True)
        pairs = _Pairs.of(form, picks, places)
        shares = _filled(form.shares(logits, picks).reshape(-1)[places], pairs.rows)

        inner = _inner(form, x, stored, pairs)
        y = _combined(form, x, stored, pairs, inner, shares).astype(x.dtype)
        return (), (y.reshape(shape), inner, picks, places)

    *apart, stored = arrays
    return on_own_rows(of_rows, tuple(apart), (stored,))[1]


def _inner(form: _Form, x: Array, stored: Stored, pairs: _Pairs) -> tuple[Array, Array]:
    """The outputs of gate and up, each (N·K + R, F), for the tokens x (N, C)."""

    def expert(number: Array, tiles: Callable[..., Any], carry: Any) -> Any:
        matrices = [form.matrix(which, stored, number, x) for which in (GATE, UP)]

        def step(tile: _Tile, carry: Any) -> Any:
            rows = tile.taken(x)
            return tuple(
                tile.put(every, rows @ matrix().T)
                for every, matrix in zip(carry, matrices, strict=True)
            )

        return tiles(step, carry)

    room = jnp.zeros((len(pairs.tokens), form.inner), x.dtype)
    found: tuple[Array, Array] = pairs.through(expert, (room, room))
    return found


def _combined(
    form: _Form,
    x: Array,
    stored: Stored,
    pairs: _Pairs,
    inner: tuple[Array, Array],
    shares: Array,
) -> Array:
    """The mixture (N, C) in fp32, from the outputs of gate and up and the shares (N·K + R,) of the pairs. It has a loop of
    its own, so that a checkpointed block does not run it again."""

    def expert(number: Array, tiles: Callable[..., Any], y: Array) -> Any:
        down = form.matrix(DOWN, stored, number, x)

        def step(tile: _Tile, y: Array) -> Array:
            gates, ups = (tile.of(every) for every in inner)
            made = gated(gates, ups, form.activation)
            return tile.added(y, tile.of(shares)[:, None] * _wide("rf,cf->rc", made, down()))

        return tiles(step, y)

    found: Array = pairs.through(expert, jnp.zeros(x.shape, jnp.float32))
    return found


def _wide(axes: str, *operands: Array) -> Array:
    """A product whose sums are kept in fp32."""
    return jnp.einsum(axes, *operands, preferred_element_type=jnp.float32)


def _mixed_forward(form: _Form, *arrays: Any) -> tuple[Array, Any]:
    wanted = any(array.perturbed for array in jax.tree.leaves(arrays[2]))
    x, logits, stored = custom_vjp_primal_tree_values(arrays)
    in_codes = any(jnp.issubdtype(array.dtype, jnp.integer) for array in jax.tree.leaves(stored))
    trained = wanted and not in_codes
    y, inner, picks, places = _outputs(form, x, logits, stored)
    inner = checkpoint_name(inner, "product")
    return y, (x, logits, stored, inner, picks, places, () if trained else None)


def _mixed_backward(form: _Form, kept: Any, gradient: Array) -> tuple[Array, Array, Any]:
    """Gradients of x, of the router's outputs, and of the matrices if they are trained.

    With q = (gradient of the output) @ W_down, a share's gradient is the inner product of q and the input of W_down. It
    needs no output of W_down.
    """
    x, logits, stored, inner, picks, places, trained = kept

    def of_rows(
        gradient: Array, x: Array, logits: Array, gates: Array, ups: Array, *rest: Any
    ) -> tuple[Any, Any]:
        picks, places, stored = rest
        shapes = x.shape, logits.shape
        x, gradient = (array.reshape(-1, x.shape[-1]) for array in (x, gradient))
        pairs = _Pairs.of(form, picks, places)
        shares, back = jax.vjp(lambda y: form.shares(y, picks), logits.reshape(-1, form.experts))
        of_pairs = _filled(shares.reshape(-1)[places], pairs.rows)

        def expert(number: Array, tiles: Callable[..., Any], carry: Any) -> Any:
            gate, up, down = (form.matrix(n, stored, number, x) for n in (GATE, UP, DOWN))

            def step(tile: _Tile, carry: Any) -> Any:
                (by_x, by_share), sums = carry
                rows, slope = tile.taken(x), tile.taken(gradient)
                made, pull = jax.vjp(
                    partial(gated, name=form.activation), tile.of(gates), tile.of(ups)
                )
                share = jnp.where(tile.is_pair, tile.of(of_pairs), 0)[:, None]
                by_made = _wide("rc,cf->rf", slope, down())
                by_share = tile.put(by_share, jnp.sum(by_made * made, axis=1))
                by_gate, by_up = pull((share * by_made).astype(x.dtype))
                back = _wide("rf,fc->rc", by_gate, gate()) + _wide("rf,fc->rc", by_up, up())
                if sums is not None:
                    slope = (share * slope).astype(x.dtype)
                    more = (by_gate, rows), (by_up, rows), (slope, made)
                    sums = tuple(
                        total + _wide("ro,ri->oi", *both)
                        for total, both in zip(sums, more, strict=True)
                    )
                return (tile.added(by_x, back), by_share), sums

            of_rows, of_matrices = carry
            if of_matrices is None:
                return tiles(step, (of_rows, None))[0], None
            zeros = tuple(jnp.zeros(m().shape, jnp.float32) for m in (gate, up, down))
            of_rows, sums = tiles(step, (of_rows, zeros))
            put = zip(of_matrices, sums, strict=True)
            return of_rows, tuple(
                lax.dynamic_update_slice_in_dim(t, s.astype(t.dtype), number * len(s), 0)
                for t, s in put
            )

        of_matrices = None if trained is None else jax.tree.map(jnp.zeros_like, stored)
        of_pair = jnp.zeros(len(pairs.tokens))
        carry = (jnp.zeros(x.shape, jnp.float32), of_pair), of_matrices
        (by_x, of_pair), of_matrices = pairs.through(expert, carry)
        by_share = (
            jnp.zeros(len(places)).at[places].set(of_pair[: len(places)], unique_indices=True)
        )
        (by_logits,) = back(by_share.reshape(picks.shape))
        by_x = by_x.astype(x.dtype).reshape(shapes[0])
        return of_matrices, (by_x, by_logits.reshape(shapes[1]))

    apart = gradient, x, logits, *inner, picks, places
    found, (by_x, by_logits) = on_own_rows(of_rows, apart, (stored,))
    return by_x, by_logits, None if found is None else jax.tree.map(shared_out, found)


_mixed.defvjp(_mixed_forward, _mixed_backward, symbolic_zeros=True)
