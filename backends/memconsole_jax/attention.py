"""Causal attention whose scores never exist whole: queries go in chunks, recomputed backwards.

The idea is Rabe and Staats 2021 ("Self-attention does not need O(n²) memory"), without the running
maximum: a chunk of queries sees all its keys at once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

SCORE_BYTES = 32 * 2**20
"""Aim for the float32 scores of one chunk; the backward pass holds about three times as much."""
FEWEST_ROWS = 64


def chunk_rows(batch: int, heads: int, length: int) -> int:
    """Queries per chunk: equal chunks whose scores (batch, heads, rows, length) fit `SCORE_BYTES`."""
    most = max(FEWEST_ROWS, SCORE_BYTES // (4 * batch * heads * length))
    chunks = -(-length // min(most, length))
    return -(-length // chunks)


def causal_attention(
    query: Array, key: Array, value: Array, scale: float, window: Array | None
) -> Array:
    """Attention of query (B, T, H, D) over key, value (B, T, K, D); returns (B, T, H, D).

    `window`: how many keys a query sees, itself included, as a scalar; None means all before it.
    """
    b, t, h, d = query.shape
    kv_heads = key.shape[2]
    if window is None and cudnn_applies(query):
        y = jax.nn.dot_product_attention(
            query, key, value, scale=scale, is_causal=True, implementation="cudnn"
        )
        return checkpoint_name(y, "attention")
    q = query.reshape(b, t, kv_heads, h // kv_heads, d)  # (B, T, K, G, D)
    rows = chunk_rows(b, h, t)
    chunks = -(-t // rows)
    one = jax.checkpoint(functools.partial(_chunk, scale=scale), prevent_cse=False)
    if chunks == 1:
        y = one(q, key, value, jnp.int32(0), window)
    else:
        q = jnp.pad(q, ((0, 0), (0, chunks * rows - t), (0, 0), (0, 0), (0, 0)))
        parts = jnp.moveaxis(q.reshape(b, chunks, rows, *q.shape[2:]), 1, 0)  # (N, B, R, K, G, D)
        starts = jnp.arange(chunks, dtype=jnp.int32) * rows
        y = lax.map(lambda xs: one(xs[0], key, value, xs[1], window), (parts, starts))
        y = jnp.moveaxis(y, 0, 1).reshape(b, chunks * rows, *q.shape[2:])[:, :t]
    return checkpoint_name(y.reshape(b, t, h, d), "attention")


def _chunk(
    q: Array, key: Array, value: Array, start: Array, window: Array | None, *, scale: float
) -> Array:
    """q (B, R, K, G, D), the queries from position `start` -> (B, R, K, G, D)."""
    scores = jnp.einsum("brkgd,bskd->bkgrs", q, key, preferred_element_type=jnp.float32) * scale
    row = start + jnp.arange(q.shape[1])[:, None]  # (R, 1)
    column = jnp.arange(key.shape[1])[None, :]  # (1, T)
    seen = column <= row
    if window is not None:
        seen &= row - column < window
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    share = jax.nn.softmax(scores, axis=-1).astype(value.dtype)  # (B, K, G, R, T)
    return jnp.einsum("bkgrs,bskd->brkgd", share, value)


def cudnn_applies(query: Any) -> bool:
    """Whether cuDNN's fused attention takes this: 16-bit on an NVIDIA GPU, head size a multiple of 8 up to 128."""
    d = query.shape[-1]
    sixteen_bit = query.dtype in (jnp.bfloat16, jnp.float16)
    return bool(sixteen_bit and d % 8 == 0 and d <= 128 and nvidia())


@functools.cache
def nvidia() -> bool:
    """Whether arrays live on an NVIDIA GPU by default."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return bool(device.platform == "gpu" and "nvidia" in device.device_kind.lower())
