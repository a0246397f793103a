"""Causal attention in chunks of queries, recomputed in the backward pass, so that the full scores
never exist.

It follows Rabe and Staats 2021 ("Self-attention does not need O(n²) memory"), but without the
running maximum, because a chunk of queries sees all its keys at once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from memconsole_jax import target
from memconsole_jax.layout.mesh import rows_of_each
from memconsole_jax.models.dropout import masked
from memconsole_jax.models.recompute import recomputed

SCORE_BYTES = 32 * 2**20
"""Target size of one chunk's float32 scores. The backward pass holds about three times as much."""
CPU_SCORE_BYTES = 8 * 2**20
"""The same for a CPU. Its reductions (YNNPACK) need up to five times the scores in addition, and
run faster in cache."""
FEWEST_ROWS = 64


def chunk_rows(batch: int, heads: int, length: int) -> int:
    """Queries per chunk: equal chunks whose scores (batch, heads, rows, length) fit `SCORE_BYTES`
    or `CPU_SCORE_BYTES`."""
    aim = CPU_SCORE_BYTES if target.kind() == "cpu" else SCORE_BYTES
    most = max(FEWEST_ROWS, aim // (4 * batch * heads * length))
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
    rows = chunk_rows(rows_of_each(b), h, t)
    chunks = -(-t // rows)
    bits, rate = drop or (None, 0.0)
    one = functools.partial(_chunk, scale, cap, rate)
    if chunks == 1:
        y = recomputed(one, (q, key, value), (jnp.int32(0), window, documents, documents, bits))
    else:
        q = jnp.pad(q, ((0, 0), (0, chunks * rows - t), (0, 0), (0, 0), (0, 0)))
        parts = jnp.moveaxis(q.reshape(b, chunks, rows, *q.shape[2:]), 1, 0)  # (N, B, R, K, G, D)
        starts = jnp.arange(chunks, dtype=jnp.int32) * rows
        own = None
        if documents is not None:
            padded = jnp.pad(documents, ((0, 0), (0, chunks * rows - t)), mode="edge")
            own = jnp.moveaxis(padded.reshape(b, chunks, rows), 1, 0)  # (N, B, R)
        # XLA does not merge the two loops, so `prevent_cse` is not needed. A custom rule instead of
        # `jax.checkpoint` would keep keys and values for every chunk.
        again = jax.checkpoint(one, prevent_cse=False)
        y = lax.map(
            lambda xs: again(xs[0], key, value, xs[1], window, xs[2], documents, bits),
            (parts, starts, own),
        )
        y = jnp.moveaxis(y, 0, 1).reshape(b, chunks * rows, *q.shape[2:])[:, :t]
    return checkpoint_name(y.reshape(b, t, h * d), "attention")


def _chunk(
    scale: float,
    cap: float | None,
    rate: float,
    q: Array,
    key: Array,
    value: Array,
    start: Array,
    window: Array | None,
    own: Array | None,
    documents: Array | None,
    bits: Array | None,
) -> Array:
    """Attention of q (B, R, K, G, D), the queries from position `start` on, which belong to
    documents `own` (B, R)."""
    scores = jnp.einsum("brkgd,bskd->bkgrs", q, key, preferred_element_type=jnp.float32) * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    row = start + jnp.arange(q.shape[1])[:, None]  # (R, 1)
    column = jnp.arange(key.shape[1])[None, :]  # (1, T)
    seen = column <= row
    if window is not None:
        seen &= row - column < window
    if own is not None and documents is not None:
        seen = (seen & (own[:, :, None] == documents[:, None, :]))[:, None, None]  # (B, 1, 1, R, T)
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    share = jax.nn.softmax(scores, axis=-1).astype(value.dtype)  # (B, K, G, R, T)
    if bits is not None:
        share = masked(share, bits + start.astype(bits.dtype), rate)
    return jnp.einsum("bkgrs,bskd->brkgd", share, value)


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
