"""Cross-entropy from hidden states, with the full logits or in chunks of tokens.

In chunks, head and loss of a few tokens at a time are computed together with their gradients, so
neither the logits (N, V) nor their gradient ever exist, and nothing is computed twice: the loss is
the end of the network, its gradient needs only the scale known at the very end (Wijmans et al. 2024
and Liger Kernel do the same in Triton). The head's gradient is summed over chunks in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memconsole_jax import target

MASKED = -100
ALIGNED_ROWS = 16
"""XLA for GPUs pads matmuls whose sizes are no multiple of this: with GPT-2's 50257 rows it would copy
the whole gradient of the logits, where a padded head costs only itself."""
CHUNK_TOKENS = 1024
"""Most tokens whose logits exist at a time."""
CPU_CHUNK_TOKENS = 128
"""The same on a CPU, whose few cores smaller products keep as busy."""


def chunk_tokens(tokens: int) -> int:
    """Tokens per chunk: equal chunks of at most so many."""
    most = CPU_CHUNK_TOKENS if target.kind() == "cpu" else CHUNK_TOKENS
    chunks = -(-tokens // most)
    return -(-tokens // chunks)


def plain_nats(hidden: Array, head: Array, targets: Array) -> Array:
    """Summed nats of targets (B, T) under hidden (B, T, C) and head (V, C), through full logits."""
    matrix = head.astype(hidden.dtype)
    missing = -head.shape[0] % ALIGNED_ROWS if target.kind() == "gpu" else 0
    if missing:
        matrix = jnp.pad(matrix, ((0, missing), (0, 0)))
    logits = (hidden @ matrix.T).astype(jnp.float32)  # (B, T, V)
    if missing:
        column = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        logits = jnp.where(column < head.shape[0], logits, jnp.finfo(jnp.float32).min)
    return jnp.sum(_nats(logits, targets))


def _nats(logits: Array, targets: Array) -> Array:
    """Nats per token (...), 0 where the target is masked; logits (..., V)."""
    kept = targets != MASKED
    # Comparing with every column fuses; gathering would make the backward pass scatter.
    column = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    picked = jnp.sum(jnp.where(column == targets[..., None], logits, 0.0), axis=-1)
    return jnp.where(kept, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0)


@jax.custom_vjp
def chunked_nats(hidden: Array, head: Array, targets: Array) -> Array:
    """`plain_nats` without the full logits."""
    parts, labels = _chunks(hidden, targets)

    def step(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        h, target = part
        return total + jnp.sum(_nats(_logits(h, head), target)), None

    total, _ = lax.scan(step, jnp.float32(0.0), (parts, labels))
    return total


def _forward(hidden: Array, head: Array, targets: Array) -> tuple[Array, Any]:
    parts, labels = _chunks(hidden, targets)
    matrix = head.astype(hidden.dtype)

    def step(carry: tuple[Array, Array], part: tuple[Array, Array]) -> tuple[Any, Array]:
        total, head_gradient = carry
        h, target = part  # (R, C), (R,)
        logits = _logits(h, head)  # (R, V)
        nats = _nats(logits, target)
        hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == target[:, None]
        slope = jax.nn.softmax(logits, axis=-1) - hit.astype(jnp.float32)
        slope = jnp.where((target != MASKED)[:, None], slope, 0.0).astype(h.dtype)
        head_gradient += jnp.matmul(slope.T, h, preferred_element_type=jnp.float32)
        return (total + jnp.sum(nats), head_gradient), slope @ matrix

    start = (jnp.float32(0.0), jnp.zeros(head.shape, jnp.float32))
    (total, head_gradient), slopes = lax.scan(step, start, (parts, labels))
    b, t, c = hidden.shape
    return total, (slopes.reshape(-1, c)[: b * t].reshape(b, t, c), head_gradient)


def _backward(kept: Any, cotangent: Array) -> tuple[Array, Array, None]:
    hidden_gradient, head_gradient = kept
    return (
        (hidden_gradient * cotangent).astype(hidden_gradient.dtype),
        head_gradient * cotangent,
        None,
    )


chunked_nats.defvjp(_forward, _backward)


def _logits(h: Array, head: Array) -> Array:
    return jnp.matmul(h, head.astype(h.dtype).T, preferred_element_type=jnp.float32)


def _chunks(hidden: Array, targets: Array) -> tuple[Array, Array]:
    """Hidden as (chunks, R, C) and targets as (chunks, R), the last chunk filled with masked rows."""
    c = hidden.shape[-1]
    rows, labels = hidden.reshape(-1, c), targets.reshape(-1)
    size = chunk_tokens(rows.shape[0])
    missing = -rows.shape[0] % size
    if missing:
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
        labels = jnp.pad(labels, (0, missing), constant_values=MASKED)
    return rows.reshape(-1, size, c), labels.reshape(-1, size)
