"""Causal attention in chunks of queries, recomputed in the backward pass, so that the full scores
never exist.

It follows Rabe and Staats 2021 ("Self-attention does not need O(n²) memory"), but without the
running maximum, because a chunk of queries sees all its keys at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from memconsole_jax import target
from memconsole_jax.layout.mesh import rows_of_each
from memconsole_jax.models.dropout import masked

SCORE_BYTES = 32 * 2**20
"""Target size of one chunk's float32 scores. The backward pass holds about four times as much."""
CPU_SCORE_BYTES = 4 * 2**20
"""The same for a CPU, whose cache such a chunk fits."""
CPU_ROWS_BYTES = 2 * 2**20
"""On a CPU several rows of the batch are in one chunk if their scores fit this."""
FEWEST_QUERIES = 64
CPU_QUERIES = 128
"""Most queries per chunk on a CPU, unless a quarter of the row is more."""
CPU_GROUPS = 4
"""On a CPU consecutive chunks form up to this many groups. All chunks of a group read the same keys: those up to the
group's last query. Four groups compute 5/8 of all scores."""


def chunk_sizes(batch: int, heads: int, length: int) -> tuple[int, int]:
    """Rows of the batch and queries per chunk. Chunks are equal. Their fp32 scores (rows, heads, queries, length) fit
    `SCORE_BYTES` unless `FEWEST_QUERIES` need more. Only a CPU divides the batch: the scores of one row fit
    `CPU_SCORE_BYTES`, and several rows share a chunk if together they fit `CPU_ROWS_BYTES`."""
    on_cpu, rows = target.kind() == "cpu", batch
    fitting = SCORE_BYTES // (4 * batch * heads * length)
    if on_cpu:
        longest = max(CPU_QUERIES, -(-length // CPU_GROUPS))
        fitting = min(CPU_SCORE_BYTES // (4 * heads * length), longest)
    chunks = -(-length // min(length, max(FEWEST_QUERIES, fitting)))
    queries = -(-length // chunks)
    if on_cpu:
        fitting = max(1, CPU_ROWS_BYTES // (4 * heads * queries * length))
        rows = max(n for n in range(1, min(batch, fitting) + 1) if batch % n == 0)
    return rows, queries


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
    rows_per_device = rows_of_each(b)
    chunk = chunk_sizes(rows_per_device, h, t)
    form = _Form(scale, cap, rate, b // rows_per_device, *chunk)
    return _in_chunks(form, (q, key, value), (window, documents, bits))


class _Form(NamedTuple):
    """What is the same for all chunks of queries."""

    scale: float
    cap: float | None
    rate: float
    """Of dropout."""
    devices: int
    """How many devices compute rows of the batch."""
    rows: int
    """Of the batch, per chunk and device."""
    queries: int
    """Per chunk."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(form: _Form, inputs: tuple[Array, ...], masking: tuple[Any, ...]) -> Array:
    """Attention (B, T, H·D), computed for one chunk of queries after another.

    `inputs` are queries (B, T, K, G, D), keys and values (B, T, K, D); `masking` are the window, the documents and
    the random bits of dropout. The backward pass computes the attention weights of each chunk again.
    """
    return _outputs(form, inputs, masking)[0]


def _outputs(
    form: _Form, inputs: tuple[Array, ...], masking: tuple[Any, ...]
) -> tuple[Array, Array]:
    """The output (B, T, H·D), and the logarithms of the sums over exponentiated scores (B, K, G, T), fp32."""
    window, documents, bits = masking

    def of_rows(bits: Array | None, documents: Array | None, *arrays: Array) -> tuple[Array, Array]:
        query, key, value = map(_heads_first, arrays)
        queries, starts, of_queries = _parts(form, query, documents)
        found: list[tuple[Array, Array]] = []
        for group, end in _groups(form, query.shape[3]):
            keys, values = key[:, :, :end], value[:, :, :end]
            of_keys = None if documents is None else documents[:, :end]

            def output(
                xs: Any, keys: Array = keys, values: Array = values, of_keys: Any = of_keys
            ) -> tuple[Array, Array]:
                q, start, documents = xs
                scores, _ = _scores(form, q, keys, start, window, documents, of_keys)
                highest = jnp.max(scores, axis=-1, keepdims=True)
                share = jnp.exp(scores - highest)
                total = jnp.sum(share, axis=-1, keepdims=True)
                dropped = _dropped(form, share, bits, start).astype(values.dtype)
                mixed = jnp.einsum(
                    "bkgrs,bksd->bkgrd", dropped, values, preferred_element_type=jnp.float32
                )
                return (mixed / total).astype(values.dtype), (highest + jnp.log(total))[..., 0]

            of_group = None if of_queries is None else of_queries[group]
            xs = _after(found, queries[group]), starts[group], of_group
            found.append(lax.map(output, xs))
        mixed, logarithms = (_whole(parts, query.shape[3]) for parts in zip(*found, strict=True))
        return _heads_last(mixed).reshape(*arrays[0].shape[:2], -1), logarithms

    return _in_parts_of_batch(form, of_rows, bits, documents, *inputs)


def _in_chunks_forward(
    form: _Form, inputs: tuple[Array, ...], masking: tuple[Any, ...]
) -> tuple[Array, Any]:
    output, logarithms = checkpoint_name(_outputs(form, inputs, masking), "attention")
    return output, (inputs, masking, output, logarithms)


def _in_chunks_backward(form: _Form, kept: Any, gradient: Array) -> tuple[Any, None]:
    """Gradients of `inputs`.

    The softmax's backward pass needs the sum over all keys of the weights times their gradients. That sum is the inner
    product of a query's output and its gradient, which needs no array of the scores' size (Dao et al. 2022,
    "FlashAttention", appendix B.2).
    """
    inputs, (window, documents, bits), output, logarithms = kept
    # Waits for the gradient. XLA would otherwise keep the weights of the forward pass where there is one chunk.
    # A number of each row, because rows may be on several devices.
    query = inputs[0] + 0 * gradient[:, 0, 0].reshape(-1, 1, 1, 1, 1)

    def of_rows(bits: Array | None, documents: Array | None, *arrays: Array) -> tuple[Array, ...]:
        query, key, value, slope, output = map(_heads_first, arrays[:-1])
        inner = jnp.sum(slope.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
        queries, starts, of_queries = _parts(form, query, documents)
        slopes, inners, logs = (_parts(form, x, None)[0] for x in (slope, inner, arrays[-1]))
        # Sums over chunks are fp32: in 16 bits a small term would vanish beside a large sum.
        summed = tuple(0 * x[:, :, :0].astype(jnp.float32) for x in (key, value))
        by_query: list[Array] = []
        for group, end in _groups(form, query.shape[3]):
            of_keys = None if documents is None else documents[:, :end]
            keys, values = key[:, :, :end], value[:, :, :end]

            def gradients(
                sums: Any,
                xs: Any,
                keys: Array = keys,
                values: Array = values,
                of_keys: Any = of_keys,
            ) -> tuple[Any, Array]:
                q, slope, inner, logarithm, start, documents = xs
                scores, capped = _scores(form, q, keys, start, window, documents, of_keys)
                share = jnp.exp(scores - logarithm[..., None])
                dropped = _dropped(form, share, bits, start).astype(slope.dtype)
                by_value = jnp.einsum(
                    "bkgrs,bkgrd->bksd", dropped, slope, preferred_element_type=jnp.float32
                )
                by_share = jnp.einsum(
                    "bkgrd,bksd->bkgrs", slope, values, preferred_element_type=jnp.float32
                )
                by_score = share * (_dropped(form, by_share, bits, start) - inner[..., None])
                if form.cap is not None:
                    by_score *= 1 - (capped / form.cap) ** 2
                by_score = (form.scale * by_score).astype(q.dtype)
                by_key = jnp.einsum(
                    "bkgrs,bkgrd->bksd", by_score, q, preferred_element_type=jnp.float32
                )
                by_query = jnp.einsum("bkgrs,bksd->bkgrd", by_score, keys)
                return (sums[0] + by_key, sums[1] + by_value), by_query

            more = ((0, 0), (0, 0), (0, end - summed[0].shape[2]), (0, 0))
            sums = jnp.pad(summed[0], more), jnp.pad(summed[1], more)
            first = _after(by_query, queries[group])
            of_group = None if of_queries is None else of_queries[group]
            xs = first, slopes[group], inners[group], logs[group], starts[group], of_group
            summed, part = lax.scan(gradients, sums, xs)
            by_query.append(part)
        whole = _whole(by_query, query.shape[3])
        by_key, by_value = (
            _heads_last(x.astype(like.dtype)) for x, like in zip(summed, (key, value), strict=True)
        )
        return _heads_last(whole), by_key, by_value

    shape = inputs[0].shape
    arrays = query, *inputs[1:], gradient.reshape(shape), output.reshape(shape), logarithms
    return _in_parts_of_batch(form, of_rows, bits, documents, *arrays), None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward)


def _in_parts_of_batch(
    form: _Form, function: Callable[..., Any], bits: Array | None, *arrays: Array | None
) -> Any:
    """`function` of the random bits and of the arrays (B, ...), computed for `form.rows` rows of each device after others.
    It returns arrays (B, ...). Each part of the rows has random bits of its own."""
    batch = next(x.shape[0] for x in arrays if x is not None)
    parts = batch // form.devices // form.rows
    if bits is not None:
        key = jax.random.wrap_key_data(bits)
        bits = jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(key, n)))(
            jnp.arange(parts)
        )

    def divided(x: Array) -> Array:
        x = x.reshape(form.devices, parts, form.rows, *x.shape[1:])
        return jnp.moveaxis(x, 1, 0).reshape(parts, -1, *x.shape[3:])

    def joined(x: Array) -> Array:
        x = x.reshape(parts, form.devices, form.rows, *x.shape[2:])
        return jnp.moveaxis(x, 0, 1).reshape(batch, *x.shape[3:])

    found = lax.map(lambda xs: function(xs[0], *xs[1]), (bits, jax.tree.map(divided, arrays)))
    return jax.tree.map(joined, found)


def _heads_first(x: Array) -> Array:
    """x (B, T, ..., D) as (B, ..., T, D)."""
    return jnp.moveaxis(x, 1, -2)


def _heads_last(x: Array) -> Array:
    """x (B, ..., T, D) as (B, T, ..., D)."""
    return jnp.moveaxis(x, -2, 1)


def _parts(form: _Form, x: Array, documents: Array | None) -> tuple[Array, Array, Array | None]:
    """Chunks of x (B, K, G, T, ...) as (N, B, K, G, R, ...), filled up with zeros; their first positions (N,); and their
    documents (N, B, R)."""
    length = x.shape[3]
    chunks = -(-length // form.queries)
    filled = (0, chunks * form.queries - length)
    x = jnp.pad(x, (*((0, 0) for _ in range(3)), filled, *((0, 0) for _ in x.shape[4:])))
    x = jnp.moveaxis(x.reshape(*x.shape[:3], chunks, form.queries, *x.shape[4:]), 3, 0)
    # Depends on x, although only formally. Masks that depended on positions alone would be computed for all chunks
    # before a loop over layers, and kept.
    starts, x = lax.optimization_barrier((jnp.arange(chunks, dtype=jnp.int32) * form.queries, x))
    if documents is not None:
        documents = jnp.pad(documents, ((0, 0), filled), mode="edge")
        documents = jnp.moveaxis(documents.reshape(-1, chunks, form.queries), 1, 0)
    return x, starts, documents


def _groups(form: _Form, length: int) -> list[tuple[slice, int]]:
    """The chunks of each group, and how many keys its queries can see."""
    chunks = -(-length // form.queries)
    groups = min(CPU_GROUPS, chunks) if target.kind() == "cpu" else 1
    bounds = [chunks * n // groups for n in range(groups + 1)]
    return [(slice(a, b), min(length, b * form.queries)) for a, b in itertools.pairwise(bounds)]


def _after(found: list[Any], x: Array) -> Array:
    """x, which waits for the last one found. XLA would otherwise compute several groups at the same time."""
    if not found:
        return x
    return x + (0 * jax.tree.leaves(found[-1])[0].reshape(-1)[0]).astype(x.dtype)


def _whole(groups: Sequence[Array], length: int) -> Array:
    """Chunks (N, B, K, G, R, ...) of all groups as one array (B, K, G, T, ...)."""
    x = jnp.moveaxis(jnp.concatenate(groups), 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :length]


def _scores(
    form: _Form,
    q: Array,
    key: Array,
    start: Array,
    window: Array | None,
    of_queries: Array | None,
    of_keys: Array | None,
) -> tuple[Array, Array]:
    """Scores of q (B, K, G, R, D), the queries from position `start` on, and the same without a mask. Both are
    (B, K, G, R, S), fp32. `of_queries` (B, R) and `of_keys` (B, S) are the documents they belong to."""
    scores = jnp.einsum("bkgrd,bksd->bkgrs", q, key, preferred_element_type=jnp.float32)
    scores *= form.scale
    if form.cap is not None:
        scores = form.cap * jnp.tanh(scores / form.cap)
    row = start + jnp.arange(q.shape[3])[:, None]  # (R, 1)
    column = jnp.arange(key.shape[2])[None, :]  # (1, S)
    mask = column <= row
    if window is not None:
        mask &= row - column < window
    if of_queries is not None and of_keys is not None:
        same = of_queries[:, :, None] == of_keys[:, None, :]
        mask = (mask & same)[:, None, None]  # (B, 1, 1, R, S)
    return jnp.where(mask, scores, jnp.finfo(jnp.float32).min), scores


def _dropped(form: _Form, share: Array, bits: Array | None, start: Array) -> Array:
    """Attention weights after dropout, if there are random bits."""
    return share if bits is None else masked(share, bits + start.astype(bits.dtype), form.rate)


def cudnn_applies(query: Any) -> bool:
    """Whether cuDNN's fused attention supports this: 16 bits, NVIDIA GPU of compute capability 8.0 or
    higher, head size a multiple of 8 up to 128."""
    d = query.shape[-1]
    sixteen_bit = query.dtype in (jnp.bfloat16, jnp.float16)
    return bool(sixteen_bit and d % 8 == 0 and d <= 128 and target.is_ampere_or_later())


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
