"""Causal attention in chunks of queries, recomputed in the backward pass, so that the full scores
never exist.

It follows Rabe and Staats 2021 ("Self-attention does not need O(n²) memory"), but without the
running maximum, because a chunk of queries sees all its keys at once.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from memconsole_jax import target
from memconsole_jax.layout.mesh import rows_of_each
from memconsole_jax.models.dropout import masked

SCORE_BYTES = 32 * 2**20
"""Target size of one chunk's float32 scores. The backward pass holds about three times as much."""
CPU_SCORE_BYTES = 8 * 2**20
"""The same for a CPU. Its reductions (YNNPACK) need up to five times the scores in addition, and
run faster in cache."""
FEWEST_ROWS = 64
CPU_CHUNKS = 8
"""Fewest chunks of the queries of a row on a CPU, if the row is long enough for four chunks of `FEWEST_ROWS`. Each chunk
has at least `FEWEST_ROWS` queries."""
CPU_GROUPS = 4
"""Most groups of a CPU's chunks. A group reads no keys after its last query, so that four groups compute 5/8 of all
scores. A group has at least two chunks: XLA turns a loop over one chunk into plain operations, and would hold the scores
of several such groups at the same time."""


def chunk_rows(batch: int, heads: int, length: int) -> int:
    """Queries per chunk: equal chunks whose scores (batch, heads, rows, length) fit `SCORE_BYTES`
    or `CPU_SCORE_BYTES`."""
    on_cpu = target.kind() == "cpu"
    most = (CPU_SCORE_BYTES if on_cpu else SCORE_BYTES) // (4 * batch * heads * length)
    if on_cpu and length >= 4 * FEWEST_ROWS:
        most = min(most, -(-length // CPU_CHUNKS))
    most = max(FEWEST_ROWS, most)
    chunks = -(-length // min(most, length))
    return -(-length // chunks)


def causal_attention(
    query: Array,
    key: Array,
    value: Array,
    scale: float,
    window: Array | None,
    documents: Array | None = None,
    cap: float | None = None,
    drop: tuple[Array, float] | None = None,
) -> Array:
    """Attention of query (B, T, H, D) over key, value (B, T, K, D).

    Returns (B, T, H·D), or with cuDNN (B, T, H, D): cuDNN keeps its output in this shape for the
    backward pass, and returning the same array avoids a second copy. `window`, a scalar, is how
    many keys a query sees, including its own; None means all before it. `documents` (B, T): a query
    sees only keys of its own document. With a `cap`, scores x become cap · tanh(x / cap) (Gemma 2).
    `drop` holds the random bits and the rate of dropout on the attention weights.
    With any of these cuDNN is not used. No full mask is ever made: each chunk computes its own.
    """
    b, t, h, d = query.shape
    kv_heads = key.shape[2]
    plain = window is None and documents is None and cap is None and drop is None
    if plain and cudnn_applies(query):
        fused = stand_in if target.is_absent() else _cudnn
        return checkpoint_name(fused(query, key, value, scale), "attention")
    q = query.reshape(b, t, kv_heads, h // kv_heads, d)  # (B, T, K, G, D)
    bits, rate = drop or (None, 0.0)
    form = _Form(scale, cap, rate, chunk_rows(rows_of_each(b), h, t))
    return _in_chunks(form, (q, key, value), (window, documents, bits))


class _Form(NamedTuple):
    """What is the same for all chunks of queries."""

    scale: float
    cap: float | None
    rate: float
    """Of dropout."""
    rows: int
    """Queries per chunk."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(form: _Form, inputs: tuple[Array, ...], rest: tuple[Any, ...]) -> Array:
    """Attention (B, T, H·D), computed for one chunk of queries after another.

    `inputs` are queries (B, T, K, G, D), keys and values (B, T, K, D); `rest` are the window, the documents and the
    random bits of dropout. The backward pass computes the attention weights of each chunk again.
    """
    return _outputs(form, inputs, rest)


def _outputs(form: _Form, inputs: tuple[Array, ...], rest: tuple[Any, ...]) -> Array:
    query, key, value = inputs
    window, documents, bits = rest
    parts, starts, own = _parts(form.rows, query, documents)
    found: list[Array] = []
    for group, end in _groups(form.rows, query.shape[1]):
        keys, values = key[:, :end], value[:, :end]
        seen = None if documents is None else documents[:, :end]

        def output(xs: Any, keys: Array = keys, values: Array = values, seen: Any = seen) -> Array:
            q, start, documents_of = xs
            share, _ = _shares(form, q, keys, start, window, documents_of, seen)
            return _mixed(_thinned(form, share, bits, start), values)

        # A group waits for the one before it. XLA would otherwise compute several at the same time.
        queries = parts[group] + 0 * found[-1].reshape(-1)[0] if found else parts[group]
        found.append(lax.map(output, (queries, starts[group], _of(own, group))))
    return _whole(found, query.shape).reshape(*query.shape[:2], -1)


def _in_chunks_forward(
    form: _Form, inputs: tuple[Array, ...], rest: tuple[Any, ...]
) -> tuple[Array, Any]:
    output = checkpoint_name(_outputs(form, inputs, rest), "attention")
    return output, (inputs, rest, output)


def _in_chunks_backward(form: _Form, kept: Any, gradient: Array) -> tuple[Any, None]:
    """Gradients of `inputs`.

    The softmax's backward pass needs the sum over all keys of the weights times their gradients. That sum is the inner
    product of a query's output and its gradient, which needs no array of the scores' size (Dao et al. 2022,
    "FlashAttention", appendix B.2).
    """
    (query, key, value), (window, documents, bits), output = kept
    # Waits for the gradient. XLA would otherwise keep the weights of the forward pass where there is one chunk.
    query += (0 * gradient.reshape(-1)[0]).astype(query.dtype)
    parts, starts, own = _parts(form.rows, query, documents)
    slopes, _, _ = _parts(form.rows, gradient.reshape(query.shape), None)
    inner = gradient.astype(jnp.float32) * output.astype(jnp.float32)
    inners, _, _ = _parts(form.rows, inner.reshape(query.shape).sum(-1), None)  # (N, B, R, K, G)
    summed, by_query = (0 * key[:, :0], 0 * value[:, :0]), []
    for group, end in _groups(form.rows, query.shape[1]):
        seen = None if documents is None else documents[:, :end]
        keys, values = key[:, :end], value[:, :end]

        def gradients(
            sums: Any, xs: Any, keys: Array = keys, values: Array = values, seen: Any = seen
        ) -> tuple[Any, Array]:
            q, slope, inner, start, documents_of = xs
            share, capped = _shares(form, q, keys, start, window, documents_of, seen)
            thinned = _thinned(form, share, bits, start)
            by_value = jnp.einsum("bkgrs,brkgd->bskd", thinned.astype(slope.dtype), slope)
            by_share = jnp.einsum(
                "brkgd,bskd->bkgrs", slope, values, preferred_element_type=jnp.float32
            )
            by_share = _thinned(form, by_share, bits, start)
            by_score = share * (by_share - jnp.moveaxis(inner, 1, -1)[..., None])
            if form.cap is not None:
                by_score *= 1 - (capped / form.cap) ** 2
            by_score = (form.scale * by_score).astype(q.dtype)
            by_query = jnp.einsum("bkgrs,bskd->brkgd", by_score, keys)
            by_key = jnp.einsum("bkgrs,brkgd->bskd", by_score, q)
            return (sums[0] + by_key, sums[1] + by_value), by_query

        more = ((0, 0), (0, end - summed[0].shape[1]), (0, 0), (0, 0))
        xs = parts[group], slopes[group], inners[group], starts[group], _of(own, group)
        summed, part = lax.scan(gradients, tuple(jnp.pad(x, more) for x in summed), xs)
        by_query.append(part)
    return (_whole(by_query, query.shape), *summed), None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward)


def _parts(rows: int, x: Array, documents: Array | None) -> tuple[Array, Array, Array | None]:
    """Chunks of x (B, T, ...) as (N, B, R, ...), filled up with zeros; their first positions (N,); and their documents
    (N, B, R)."""
    chunks = -(-x.shape[1] // rows)
    filled = (0, chunks * rows - x.shape[1])
    x = jnp.pad(x, ((0, 0), filled, *((0, 0) for _ in x.shape[2:])))
    # Depends on x, although only formally. Masks that depended on positions alone would be computed for all chunks
    # before a loop over layers, and kept.
    starts, x = lax.optimization_barrier((jnp.arange(chunks, dtype=jnp.int32) * rows, x))
    if documents is not None:
        documents = _stacked(jnp.pad(documents, ((0, 0), filled), mode="edge"), rows)
    return _stacked(x, rows), starts, documents


def _stacked(x: Array, rows: int) -> Array:
    return jnp.moveaxis(x.reshape(x.shape[0], -1, rows, *x.shape[2:]), 1, 0)


def _groups(rows: int, length: int) -> list[tuple[slice, int]]:
    """The chunks of each group, and how many keys its queries can see."""
    chunks = -(-length // rows)
    groups = min(CPU_GROUPS, max(1, chunks // 2)) if target.kind() == "cpu" else 1
    bounds = [chunks * n // groups for n in range(groups + 1)]
    return [(slice(a, b), min(length, b * rows)) for a, b in itertools.pairwise(bounds)]


def _of(own: Array | None, group: slice) -> Array | None:
    return None if own is None else own[group]


def _whole(parts: list[Array], shape: tuple[int, ...]) -> Array:
    """Chunks (N, B, R, ...) of all groups as one array of `shape` (B, T, ...)."""
    x = jnp.moveaxis(jnp.concatenate(parts), 0, 1)
    return x.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]


def _shares(
    form: _Form,
    q: Array,
    key: Array,
    start: Array,
    window: Array | None,
    own: Array | None,
    documents: Array | None,
) -> tuple[Array, Array]:
    """Attention weights of q (B, R, K, G, D), the queries from position `start` on, which belong to documents `own`
    (B, R); and the scores that they come from. Both are (B, K, G, R, S), fp32."""
    scores = jnp.einsum("brkgd,bskd->bkgrs", q, key, preferred_element_type=jnp.float32)
    scores *= form.scale
    if form.cap is not None:
        scores = form.cap * jnp.tanh(scores / form.cap)
    row = start + jnp.arange(q.shape[1])[:, None]  # (R, 1)
    column = jnp.arange(key.shape[1])[None, :]  # (1, S)
    seen = column <= row
    if window is not None:
        seen &= row - column < window
    if own is not None and documents is not None:
        seen = (seen & (own[:, :, None] == documents[:, None, :]))[:, None, None]  # (B, 1, 1, R, S)
    return jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1), scores


def _thinned(form: _Form, share: Array, bits: Array | None, start: Array) -> Array:
    """Attention weights after dropout, if there are random bits."""
    return share if bits is None else masked(share, bits + start.astype(bits.dtype), form.rate)


def _mixed(share: Array, value: Array) -> Array:
    """Values (B, S, K, D) added up by the weights (B, K, G, R, S): (B, R, K, G, D)."""
    return jnp.einsum("bkgrs,bskd->brkgd", share.astype(value.dtype), value)


def cudnn_applies(query: Any) -> bool:
    """Whether cuDNN's fused attention supports this: 16 bits, NVIDIA GPU, head size a multiple of 8
    up to 128."""
    d = query.shape[-1]
    sixteen_bit = query.dtype in (jnp.bfloat16, jnp.float16)
    return bool(sixteen_bit and d % 8 == 0 and d <= 128 and target.kind() == "gpu")


def _cudnn(query: Array, key: Array, value: Array, scale: float) -> Array:
    return jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=True, implementation="cudnn"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def stand_in(query: Array, key: Array, value: Array, scale: float) -> Array:
    """Stands in for cuDNN's fused attention when compiling without cuDNN. It needs the same memory:
    it reads and writes the same arrays, and keeps the output and fp32 log-sum-exps (B, H, T) for
    the backward pass."""
    return _stand_in_forward(query, key, value, scale)[0]


def _stand_in_forward(query: Array, key: Array, value: Array, scale: float) -> tuple[Array, Any]:
    b, t, h, d = query.shape
    grouped = query.reshape(b, t, key.shape[2], -1, d)
    mixed = grouped * scale + key[:, :, :, None] + value[:, :, :, None]
    sums = jnp.sum(mixed.astype(jnp.float32), axis=-1).reshape(b, t, h).transpose(0, 2, 1)
    output, sums = lax.optimization_barrier((mixed.reshape(query.shape), sums))
    return output, (query, key, value, output, sums)


def _stand_in_backward(scale: float, kept: Any, gradient: Array) -> tuple[Array, Array, Array]:
    query, key, value, output, sums = kept
    by_query = query * gradient * scale + output + sums.transpose(0, 2, 1)[..., None]
    by_query = by_query.astype(query.dtype)
    shared = by_query.reshape(*key.shape[:3], -1, key.shape[-1]).sum(axis=3)
    gradients = by_query, (shared + key).astype(key.dtype), (shared * value).astype(value.dtype)
    return lax.optimization_barrier(gradients)  # type: ignore[no-any-return,unused-ignore]


stand_in.defvjp(_stand_in_forward, _stand_in_backward)
