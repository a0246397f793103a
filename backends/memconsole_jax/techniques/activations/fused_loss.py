"""Cross-entropy of a language model's logits. Either all logits exist at once (`whole`), or those of a chunk of tokens at
a time (`chunked`).

In chunks, the head and the loss of a few tokens are computed together with their gradients. So
neither the full logits (N, V) nor their gradient ever exist, and nothing is computed twice. This
works because the loss is the end of the network: its gradients only lack a scalar factor, which the
backward pass applies. Wijmans et al. 2024 and Liger Kernel do the same in Triton. The head's
gradient is summed over chunks in float32.

Letters in shapes: B rows, T tokens, C hidden size, V vocabulary, N = B·T targets, R targets of one chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memconsole_jax import target
from memconsole_jax.layout.mesh import rows_per_device, shard_gradient, shard_map_rows

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
def whole(
    hidden: Array,
    head: Array,
    targets: Array,
    share: Array | float = 1.0,
    head_gradient_sum: Array | None = None,
    cap: float | None = None,
) -> Array:
    """Summed cross-entropy in nats of targets (B, T) given hidden (B, T, C) and head (V, C), times `share`, from all
    logits at once. For a mean, `share` is 1 divided by the number of targets; each target may also have its own (B, T).
    With a `cap`, logits x become cap · tanh(x / cap) (Gemma 2).

    `head_gradient_sum` (V, C), float32, is the sum of the head's gradients of earlier micro-batches. If it is given, the
    gradient with respect to it is this sum plus the head's gradient, and the gradient with respect to `head` is
    None. This is only correct if this function's result itself is differentiated, and not a function of it.
    """
    return _whole_forward(hidden, head, targets, share, head_gradient_sum, cap)[0]


def _whole_forward(
    hidden: Array,
    head: Array,
    targets: Array,
    share: Array | float,
    head_gradient_sum: Array | None,
    cap: float | None,
) -> tuple[Array, Any]:
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)  # (N, C), (N,)
    logits = rows @ _padded_head(head, hidden).T  # (N, V)
    nats, picked = _nats(_without_padding(logits, head.shape[0], cap), labels)
    saved = hidden, head, labels, logits, (nats, picked), share, head_gradient_sum
    return _total(nats, labels, share), saved


def _whole_backward(cap: float | None, saved: Any, cotangent: Array) -> tuple[Any, ...]:
    """The logits are saved; their gradient overwrites them."""
    hidden, head, labels, logits, (nats, picked), share, head_gradient_sum = saved
    fp32_logits = _without_padding(logits, head.shape[0], cap)
    factor = _column(share) * cotangent
    gradient = (_logits_gradient(fp32_logits, labels, nats, picked, cap) * factor).astype(
        logits.dtype
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    # In this order XLA on a CPU makes a transposed copy of the rows; in the other order, of the
    # larger gradient of the logits.
    head_gradient = jnp.matmul(rows.T, gradient).T[: head.shape[0]]
    hidden_gradient = (gradient @ _padded_head(head, hidden)).reshape(hidden.shape)
    if head_gradient_sum is None:
        return hidden_gradient, head_gradient.astype(head.dtype), None, None, None
    summed = head_gradient_sum + head_gradient.astype(jnp.float32)
    return hidden_gradient, None, None, None, summed


whole.defvjp(_whole_forward, _whole_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def chunked(
    hidden: Array,
    head: Array,
    targets: Array,
    share: Array | float = 1.0,
    head_gradient_sum: Array | None = None,
    cap: float | None = None,
) -> Array:
    """The same as `whole`, from the logits of a chunk of tokens at a time."""

    def of_rows(hidden: Array, targets: Array, head: Array) -> tuple[Array, None]:
        def step(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
            h, labels = part
            return total + _total(_nats(_logits(h, head, cap), labels)[0], labels), None

        return lax.scan(step, jnp.float32(0.0), _chunks(hidden, targets))

    total, _ = shard_map_rows(of_rows, (hidden, targets), (head,))
    return total * share


def _chunked_forward(
    hidden: Array,
    head: Array,
    targets: Array,
    share: Array | float,
    head_gradient_sum: Array | None,
    cap: float | None,
) -> tuple[Array, Any]:
    """The loss, and its gradients: they are computed here, because the logits exist only here."""
    share_per_target = jnp.ndim(share) > 0

    def of_rows(hidden: Array, targets: Array, shares: Array, head: Array, start: Array) -> Any:
        head = _late_head(head, hidden)
        matrix = head.astype(hidden.dtype)

        def step(carry: tuple[Array, Array], part: tuple[Array, ...]) -> tuple[Any, Array]:
            total, head_gradient = carry
            h, labels, *own_shares = part  # (R, C), (R,)
            factor = own_shares[0] if own_shares else shares
            logits = _logits(h, head, cap)  # (R, V)
            nats, picked = _nats(logits, labels)
            gradient = _logits_gradient(logits, labels, nats, picked, cap)
            gradient = (gradient * _column(factor)).astype(h.dtype)
            head_gradient += jnp.matmul(gradient.T, h, preferred_element_type=jnp.float32)
            return (total + _total(nats, labels, factor), head_gradient), gradient @ matrix

        parts = _chunks(hidden, targets, *([shares] if share_per_target else []))
        sums, hidden_gradients = lax.scan(step, (jnp.float32(0.0), start), parts)
        b, t, c = hidden.shape
        return sums, hidden_gradients.reshape(-1, c)[: b * t].reshape(b, t, c)

    # If each device has rows of its own, it starts with zeros, because the devices' sums are added up.
    distributed = rows_per_device(len(hidden)) < len(hidden)
    from_zero = head_gradient_sum is None or distributed
    start = jnp.zeros(head.shape, jnp.float32) if from_zero else head_gradient_sum
    inputs = hidden, targets, jnp.asarray(share, jnp.float32), head, start
    sharded = 3 if share_per_target else 2
    (total, head_gradient), hidden_gradient = shard_map_rows(
        of_rows, inputs[:sharded], inputs[sharded:]
    )
    head_gradient = shard_gradient(head_gradient)
    if head_gradient_sum is None:
        return total, (hidden_gradient, head_gradient.astype(head.dtype), None)
    summed = head_gradient_sum + head_gradient if distributed else head_gradient
    return total, (hidden_gradient, None, summed)


def _chunked_backward(cap: float | None, saved: Any, cotangent: Array) -> tuple[Any, ...]:
    hidden_gradient, head_gradient, head_gradient_sum = saved
    scaled = (hidden_gradient * cotangent).astype(hidden_gradient.dtype)
    if head_gradient_sum is not None:
        return scaled, None, None, None, head_gradient_sum
    return scaled, (head_gradient * cotangent).astype(head_gradient.dtype), None, None, None


chunked.defvjp(_chunked_forward, _chunked_backward)


def nats_of_rows(hidden: Array, head: Array, targets: Array, cap: float | None = None) -> Array:
    """The summed nats of each row's unmasked targets (B,), from hidden (B, T, C) and head (V, C), from the logits of a chunk
    of tokens at a time. Not to be differentiated."""

    def of_rows(hidden: Array, targets: Array, head: Array) -> tuple[Array, Array]:
        head = _late_head(head, hidden)

        def step(total: Array, part: tuple[Array, Array]) -> tuple[Array, Array]:
            h, labels = part
            nats = _nats(_logits(h, head, cap), labels)[0]
            return total, jnp.where(labels != MASKED, nats, 0.0)

        no_sums, nats = lax.scan(step, jnp.float32(0.0), _chunks(hidden, targets))
        return no_sums, nats.reshape(-1)[: targets.size].reshape(targets.shape).sum(-1)

    return shard_map_rows(of_rows, (hidden, targets), (head,))[1]


def _nats(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Nats per token (N,), and the logits of the targets (N,), from float32 logits (N, V)."""
    if target.kind() == "cpu":
        picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    else:  # comparing with every column can be fused, also with the computation of the logits
        column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        picked = jnp.sum(jnp.where(column == targets[:, None], logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked, picked


def _total(nats: Array, targets: Array, share: Array | float = 1.0) -> Array:
    """The sum over unmasked targets, times their `share`."""
    if jnp.ndim(share):
        return jnp.sum(jnp.where(targets != MASKED, nats * jnp.reshape(share, -1), 0.0))
    return jnp.sum(jnp.where(targets != MASKED, nats, 0.0)) * share


def _column(share: Array | float) -> Array | float:
    """The factor of logits (N, V): the share of all targets, or that of each target (N, 1)."""
    return jnp.reshape(share, (-1, 1)) if jnp.ndim(share) else share


def _logits_gradient(
    logits: Array, targets: Array, nats: Array, picked: Array, cap: float | None
) -> Array:
    """The gradient of the nats with respect to the logits (N, V) before the cap: softmax - onehot, times the cap's derivative.
    The softmax is computed from `nats` and `picked`, the results of `_nats`: so nothing reads the logits later, and XLA can
    overwrite them."""
    onehot = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    softmax = jnp.exp(logits - (nats + picked)[:, None])
    gradient = jnp.where((targets != MASKED)[:, None], softmax - onehot, 0.0)
    # Logits of padding are far below the cap. Their gradient stays 0.
    return gradient if cap is None else gradient * (1 - jnp.minimum(jnp.square(logits / cap), 1.0))


def _late_head(head: Array, hidden: Array) -> Array:
    """The head. On a CPU it depends on `hidden` (B, T, C) if their dtypes differ. Otherwise XLA would cast it once for all
    micro-batches and keep it."""
    if target.kind() == "cpu" and head.dtype != hidden.dtype:
        return head + 0 * hidden[0, 0, 0]
    return head


def _padded_head(head: Array, hidden: Array) -> Array:
    """The head (V, C) in the dtype of `hidden` (B, T, C), with rows of zeros as XLA for GPUs would pad it."""
    matrix = _late_head(head, hidden).astype(hidden.dtype)
    missing = -matrix.shape[0] % ALIGNED_ROWS if target.kind() == "gpu" else 0
    return jnp.pad(matrix, ((0, missing), (0, 0))) if missing else matrix


def _without_padding(logits: Array, vocabulary: int, cap: float | None) -> Array:
    """Capped logits (N, V or more) in float32; those of the head's padding get the lowest float32 value."""
    capped = _capped(logits.astype(jnp.float32), cap)
    if logits.shape[-1] == vocabulary:
        return capped
    column = lax.broadcasted_iota(jnp.int32, capped.shape, 1)
    return jnp.where(column < vocabulary, capped, jnp.finfo(jnp.float32).min)


def _logits(h: Array, head: Array, cap: float | None) -> Array:
    """Capped float32 logits (R, V) of hidden states (R, C)."""
    logits = jnp.matmul(h, head.astype(h.dtype).T, preferred_element_type=jnp.float32)
    return _capped(logits, cap)


def _capped(logits: Array, cap: float | None) -> Array:
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _chunks(hidden: Array, targets: Array, *shares: Array) -> tuple[Array, ...]:
    """Hidden as (chunks, R, C), targets as (chunks, R) and so their shares, if given; the last chunk is padded with
    masked rows."""
    c = hidden.shape[-1]
    rows, labels = hidden.reshape(-1, c), targets.reshape(-1)
    flat_shares = [share.reshape(-1) for share in shares]
    size = chunk_tokens(rows.shape[0])
    missing = -rows.shape[0] % size
    if missing:
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
        labels = jnp.pad(labels, (0, missing), constant_values=MASKED)
        flat_shares = [jnp.pad(share, (0, missing)) for share in flat_shares]
    return (rows.reshape(-1, size, c), *(flat.reshape(-1, size) for flat in (labels, *flat_shares)))
