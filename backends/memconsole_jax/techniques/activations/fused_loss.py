"""Cross-entropy from hidden states, with the full logits or in chunks of tokens.

In chunks, the head and the loss of a few tokens are computed together with their gradients. So
neither the full logits (N, V) nor their gradient ever exist, and nothing is computed twice. This
works because the loss is the end of the network: its gradients only lack a scalar factor, which the
backward pass applies. Wijmans et al. 2024 and Liger Kernel do the same in Triton. The head's
gradient is summed over chunks in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memconsole_jax import target
from memconsole_jax.layout.mesh import on_own_rows, rows_of_each, shared_out

MASKED = -100
ALIGNED_ROWS = 16
"""XLA for GPUs pads matmuls whose sizes are not a multiple of this. With GPT-2's 50257 rows it
would copy the whole gradient of the logits; padding the head in advance copies only the head."""
CHUNK_TOKENS = 1024
"""Most tokens per chunk."""
CPU_CHUNK_TOKENS = 128
"""The same on a CPU, whose few cores are busy with smaller products already."""


def chunk_tokens(tokens: int) -> int:
    """Tokens per chunk: chunks are equal and do not exceed the maximum."""
    most = CPU_CHUNK_TOKENS if target.kind() == "cpu" else CHUNK_TOKENS
    chunks = -(-tokens // most)
    return -(-tokens // chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def plain_nats(
    hidden: Array,
    head: Array,
    targets: Array,
    share: Array | float = 1.0,
    begun: Array | None = None,
    cap: float | None = None,
) -> Array:
    """Summed nats of targets (B, T) given hidden (B, T, C) and head (V, C), times `share`, from
    full logits.

    `begun` (V, C), float32, is the sum of the head's gradients so far. If it is given, the gradient with
    respect to `begun` is this sum plus the head's gradient, and the gradient with respect to `head` is
    None. This is only correct if this function's result itself is differentiated, and not a function of
    it. With a `cap`, logits x become cap · tanh(x / cap) (Gemma 2). Each target may have its own share (B, T).
    """
    return _plain_forward(hidden, head, targets, share, begun, cap)[0]


def _plain_forward(
    hidden: Array,
    head: Array,
    targets: Array,
    share: Array | float,
    begun: Array | None,
    cap: float | None,
) -> tuple[Array, Any]:
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)  # (N, C), (N,)
    logits = rows @ _narrowed(head, hidden).T  # (N, V)
    nats, picked = _nats(_of_vocabulary(logits, head.shape[0], cap), labels)
    kept = hidden, head, labels, logits, (nats, picked), share, begun
    return _total(nats, labels, share), kept


def _plain_backward(cap: float | None, kept: Any, cotangent: Array) -> tuple[Any, ...]:
    """The full logits were kept; their gradient overwrites them."""
    hidden, head, labels, logits, (nats, picked), share, begun = kept
    whole = _of_vocabulary(logits, head.shape[0], cap)
    factor = _column(share) * cotangent
    slope = (_slope(whole, labels, nats, picked, cap) * factor).astype(logits.dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    # In this order XLA on a CPU makes a transposed copy of the rows; in the other order, of the
    # larger slopes.
    head_gradient = jnp.matmul(rows.T, slope).T[: head.shape[0]]
    hidden_gradient = (slope @ _narrowed(head, hidden)).reshape(hidden.shape)
    if begun is None:
        return hidden_gradient, head_gradient.astype(head.dtype), None, None, None
    return hidden_gradient, None, None, None, begun + head_gradient.astype(jnp.float32)


plain_nats.defvjp(_plain_forward, _plain_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def chunked_nats(
    hidden: Array,
    head: Array,
    targets: Array,
    share: Array | float = 1.0,
    begun: Array | None = None,
    cap: float | None = None,
) -> Array:
    """`plain_nats` without the full logits."""

    def of_rows(hidden: Array, targets: Array, head: Array) -> tuple[Array, None]:
        def step(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
            h, target = part
            return total + _total(_nats(_logits(h, head, cap), target)[0], target), None

        return lax.scan(step, jnp.float32(0.0), _chunks(hidden, targets))

    total, _ = on_own_rows(of_rows, (hidden, targets), (head,))
    return total * share


def _chunked_forward(
    hidden: Array,
    head: Array,
    targets: Array,
    share: Array | float,
    begun: Array | None,
    cap: float | None,
) -> tuple[Array, Any]:
    apiece = jnp.ndim(share) > 0  # each target has its own

    def of_rows(hidden: Array, targets: Array, shares: Array, head: Array, start: Array) -> Any:
        head = _of_these_rows(head, hidden)
        matrix = head.astype(hidden.dtype)

        def step(carry: tuple[Array, Array], part: tuple[Array, ...]) -> tuple[Any, Array]:
            total, head_gradient = carry
            h, target, *own = part  # (R, C), (R,)
            factor = own[0] if own else shares
            logits = _logits(h, head, cap)  # (R, V)
            nats, picked = _nats(logits, target)
            slope = (_slope(logits, target, nats, picked, cap) * _column(factor)).astype(h.dtype)
            head_gradient += jnp.matmul(slope.T, h, preferred_element_type=jnp.float32)
            return (total + _total(nats, target, factor), head_gradient), slope @ matrix

        parts = _chunks(hidden, targets, *([shares] if apiece else []))
        sums, slopes = lax.scan(step, (jnp.float32(0.0), start), parts)
        b, t, c = hidden.shape
        return sums, slopes.reshape(-1, c)[: b * t].reshape(b, t, c)

    # Devices begin with zero, because their sums are added up.
    apart = rows_of_each(len(hidden)) < len(hidden)
    start = jnp.zeros(head.shape, jnp.float32) if begun is None or apart else begun
    inputs = hidden, targets, jnp.asarray(share, jnp.float32), head, start
    of_each = 3 if apiece else 2
    (total, head_gradient), hidden_gradient = on_own_rows(
        of_rows, inputs[:of_each], inputs[of_each:]
    )
    head_gradient = shared_out(head_gradient)
    if begun is None:
        return total, (hidden_gradient, head_gradient.astype(head.dtype), None)
    return total, (hidden_gradient, None, begun + head_gradient if apart else head_gradient)


def _chunked_backward(cap: float | None, kept: Any, cotangent: Array) -> tuple[Any, ...]:
    hidden_gradient, head_gradient, begun = kept
    scaled = (hidden_gradient * cotangent).astype(hidden_gradient.dtype)
    if begun is not None:
        return scaled, None, None, None, begun
    return scaled, (head_gradient * cotangent).astype(head_gradient.dtype), None, None, None


chunked_nats.defvjp(_chunked_forward, _chunked_backward)


def _nats(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Nats per token (N,), and the logits of the targets (N,), from float32 logits (N, V)."""
    if target.kind() == "cpu":
        picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    else:  # comparing with every column can be fused, also with the computation of the logits
        column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        picked = jnp.sum(jnp.where(column == targets[:, None], logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked, picked


def nats_of_rows(hidden: Array, head: Array, targets: Array, cap: float | None = None) -> Array:
    """The summed nats of each row's unmasked targets (B,), from hidden (B, T, C) and head (V, C), without the full
    logits. Not to be differentiated."""

    def of_rows(hidden: Array, targets: Array, head: Array) -> tuple[Array, Array]:
        head = _of_these_rows(head, hidden)

        def step(total: Array, part: tuple[Array, Array]) -> tuple[Array, Array]:
            h, target = part
            nats = _nats(_logits(h, head, cap), target)[0]
            return total, jnp.where(target != MASKED, nats, 0.0)

        nothing, nats = lax.scan(step, jnp.float32(0.0), _chunks(hidden, targets))
        return nothing, nats.reshape(-1)[: targets.size].reshape(targets.shape).sum(-1)

    return on_own_rows(of_rows, (hidden, targets), (head,))[1]


def _total(nats: Array, targets: Array, share: Array | float = 1.0) -> Array:
    """The sum over unmasked targets, times their `share`."""
    if jnp.ndim(share):
        return jnp.sum(jnp.where(targets != MASKED, nats * jnp.reshape(share, -1), 0.0))
    return jnp.sum(jnp.where(targets != MASKED, nats, 0.0)) * share


def _column(share: Array | float) -> Array | float:
    """A share that is multiplied with logits (N, V): as it is, or that of each target (N, 1)."""
    return jnp.reshape(share, (-1, 1)) if jnp.ndim(share) else share


def _slope(logits: Array, targets: Array, nats: Array, picked: Array, cap: float | None) -> Array:
    """Gradient of nats with respect to logits (N, V) as they were before the cap. It uses `nats` and `picked`, so that nothing
    reads the logits later and XLA can overwrite them."""
    hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    shares = jnp.exp(logits - (nats + picked)[:, None])
    slope = jnp.where((targets != MASKED)[:, None], shares - hit, 0.0)
    # Logits of padding are far below the cap. Their slope stays 0.
    return slope if cap is None else slope * (1 - jnp.minimum(jnp.square(logits / cap), 1.0))


def _narrowed(head: Array, hidden: Array) -> Array:
    """The head in the dtype of `hidden` (B, T, C), padded."""
    return _padded(_of_these_rows(head, hidden).astype(hidden.dtype))


def _of_these_rows(head: Array, hidden: Array) -> Array:
    """The head. On a CPU it depends on `hidden` if their dtypes differ. Otherwise XLA would narrow it once for all
    micro-batches and keep it."""
    if target.kind() == "cpu" and head.dtype != hidden.dtype:
        return head + 0 * hidden[0, 0, 0]
    return head


def _padded(matrix: Array) -> Array:
    """The head (V, C) padded as XLA for GPUs would pad it."""
    missing = -matrix.shape[0] % ALIGNED_ROWS if target.kind() == "gpu" else 0
    return jnp.pad(matrix, ((0, missing), (0, 0))) if missing else matrix


def _of_vocabulary(logits: Array, vocabulary: int, cap: float | None) -> Array:
    """Capped logits (N, V or more) in float32; those of padding get the lowest float32 value."""
    whole = _capped(logits.astype(jnp.float32), cap)
    if logits.shape[-1] == vocabulary:
        return whole
    column = lax.broadcasted_iota(jnp.int32, whole.shape, 1)
    return jnp.where(column < vocabulary, whole, jnp.finfo(jnp.float32).min)


def _logits(h: Array, head: Array, cap: float | None) -> Array:
    found = jnp.matmul(h, head.astype(h.dtype).T, preferred_element_type=jnp.float32)
    return _capped(found, cap)


def _capped(logits: Array, cap: float | None) -> Array:
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _chunks(hidden: Array, targets: Array, *shares: Array) -> tuple[Array, ...]:
    """Hidden as (chunks, R, C), targets as (chunks, R) and so their shares, if given; the last chunk is padded with
    masked rows."""
    c = hidden.shape[-1]
    rows, labels = hidden.reshape(-1, c), targets.reshape(-1)
    own = [share.reshape(-1) for share in shares]
    size = chunk_tokens(rows.shape[0])
    missing = -rows.shape[0] % size
    if missing:
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
        labels = jnp.pad(labels, (0, missing), constant_values=MASKED)
        own = [jnp.pad(share, (0, missing)) for share in own]
    return (rows.reshape(-1, size, c), *(flat.reshape(-1, size) for flat in (labels, *own)))
