"""The decoder of GPT-2, Llama and Gemma as Flax NNX modules, built from one `Architecture`.

Notable:
- all blocks have the same shapes, so their weights are stacked on a leading axis (L, ...) and one
  block's code runs in a `lax.scan`: the program does not grow with depth
- local and global layers run the same code; a flag per layer picks the window and the rotation
- half-split rotary embeddings, as in transformers; Llama 3.1 and linear frequency scaling
- norms, softmax and loss in float32, matrices (out, in) used as ``x @ W.T``
- weights stay float32; each is cast to the compute dtype where it is used, one block at a time

Letters in shapes: B batch, T sequence, C hidden, H heads, K key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from memconsole.plan.architecture import Architecture, RopeScaling
from memconsole_jax import target
from memconsole_jax.models import accumulation
from memconsole_jax.models.accumulation import Sums
from memconsole_jax.models.attention import causal_attention
from memconsole_jax.models.recompute import recomputed

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps one block's function, such as `checkpointing.full`."""


class Linear(nnx.Module):
    """``x @ W.T + b``: (B, T, inputs) -> (B, T, outputs), in the dtype of x."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None

    def __call__(self, x: Array) -> Array:
        return product(x, self.weight[...], None if self.bias is None else self.bias[...])


class Embedding(nnx.Module):
    """A table of rows (rows, hidden)."""

    def __init__(self, rows: int, hidden: int) -> None:
        self.weight = nnx.Param(jnp.zeros((rows, hidden)))

    def __call__(self, indices: Array) -> Array:
        return looked_up(self.weight[...], indices)


@jax.custom_vjp
def looked_up(table: Array, indices: Array) -> Array:
    """Rows of a table (rows, hidden), in float32: a frequent row's gradient is a sum of many."""
    return table[indices].astype(jnp.float32)


def _looked_up_forward(table: Array, indices: Array) -> tuple[Array, Any]:
    return looked_up(table, indices), (indices, jnp.zeros((0, table.shape[0]), table.dtype))


def _looked_up_backward(kept: Any, gradient: Array) -> tuple[Array, None]:
    indices, kind = kept
    shape = kind.shape[1], gradient.shape[-1]
    # Without a need for the gradient XLA would make room for zeros long before they are added to.
    zero = 0 * gradient.reshape(-1)[0]
    return jnp.full(shape, zero).at[indices].add(gradient).astype(kind.dtype), None


looked_up.defvjp(_looked_up_forward, _looked_up_backward)


class Norm(nnx.Module):
    """Layer norm, or RMS norm (Zhang and Sennrich 2019), over the last axis; statistics in float32."""

    def __init__(self, a: Architecture, size: int) -> None:
        self.centred = a.norm == "layernorm" and size == a.hidden_size
        self.eps = a.norm_eps
        self.offset = 1.0 if a.norm_unit_offset else 0.0
        self.weight = nnx.Param(jnp.zeros((size,)))
        self.bias = nnx.Param(jnp.zeros((size,))) if a.biases and size == a.hidden_size else None

    def __call__(self, x: Array) -> Array:
        bias = None if self.bias is None else self.bias[...]
        inputs = x, self.weight[...], bias
        if target.kind() == "cpu":
            return recomputed(self._normed, inputs)
        # Elsewhere XLA fuses all of it, and would hold a second x for the rule.
        return jax.checkpoint(self._normed, prevent_cse=False)(*inputs)

    def _normed(self, x: Array, weight: Array, bias: Array | None) -> Array:
        y = x.astype(jnp.float32)
        if self.centred:
            y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y = y * (self.offset + weight)
        return (y if bias is None else y + bias).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with grouped key-value heads."""

    def __init__(self, a: Architecture) -> None:
        self.heads, self.kv_heads, self.head_size = a.heads, a.kv_heads, a.head_size
        self.scale = a.scale
        self.query = Linear(a.hidden_size, a.query_width, a.biases)
        self.key = Linear(a.hidden_size, a.key_width, a.biases)
        self.value = Linear(a.hidden_size, a.key_width, a.biases)
        self.output = Linear(a.query_width, a.hidden_size, a.biases)
        self.query_norm = Norm(a, a.head_size) if a.query_key_norm else None
        self.key_norm = Norm(a, a.head_size) if a.query_key_norm else None

    def project(self, x: Array, rotation: Rotation | None) -> tuple[Array, Array, Array]:
        """Queries (B, T, H, D), keys and values (B, T, K, D), normed and rotated."""
        b, t, _ = x.shape
        q = self.query(x).reshape(b, t, self.heads, self.head_size)  # (B, T, H, D)
        k = self.key(x).reshape(b, t, self.kv_heads, self.head_size)  # (B, T, K, D)
        v = self.value(x).reshape(b, t, self.kv_heads, self.head_size)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def __call__(
        self,
        x: Array,
        rotation: Rotation | None,
        window: Array | None,
        documents: Array | None = None,
    ) -> Array:
        q, k, v = self.project(x, rotation)
        y = causal_attention(q, k, v, self.scale, window, documents)  # (B, T, H·D) or (B, T, H, D)
        return self.output(y)  # (B, T, C)


class MLP(nnx.Module):
    """Up, activation (gated: SwiGLU or GeGLU), down."""

    def __init__(self, a: Architecture) -> None:
        self.activation = a.activation
        self.gate = Linear(a.hidden_size, a.intermediate_size, a.biases) if a.gated_mlp else None
        self.up = Linear(a.hidden_size, a.intermediate_size, a.biases)
        self.down = Linear(a.intermediate_size, a.hidden_size, a.biases)

    def __call__(self, x: Array) -> Array:
        up = self.up(x)
        if self.gate is None:
            return self.down(activate(up, self.activation))
        return self.down(gated(self.gate(x), up, self.activation))


class Block(nnx.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; Gemma 3 norms both sums' terms again."""

    def __init__(self, a: Architecture) -> None:
        self.attention_norm = Norm(a, a.hidden_size)
        self.attention = Attention(a)
        self.attention_post_norm = Norm(a, a.hidden_size) if a.post_norms else None
        self.mlp_norm = Norm(a, a.hidden_size)
        self.mlp = MLP(a)
        self.mlp_post_norm = Norm(a, a.hidden_size) if a.post_norms else None

    def __call__(
        self,
        x: Array,
        rotation: Rotation | None,
        window: Array | None,
        dtype: Any = jnp.float32,
        documents: Array | None = None,
    ) -> Array:
        """The residual stream x (B, T, C) stays float32; everything between is in `dtype`."""
        y = self.attention(self.attention_norm(x).astype(dtype), rotation, window, documents)
        return self.feed(x, y, dtype)

    def feed(self, x: Array, y: Array, dtype: Any = jnp.float32) -> Array:
        """The block after its attention: x and y are (B, T, C)."""
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(self.mlp_norm(x).astype(dtype))
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))


class Decoder(nnx.Module):
    """Tokens (B, T) to logits (B, T, V)."""

    def __init__(self, a: Architecture) -> None:
        self.architecture = a
        self.embedding = Embedding(a.vocab_size, a.hidden_size)
        learned = a.positions == "learned"
        self.positions = Embedding(a.max_positions, a.hidden_size) if learned else None
        self.layers = nnx.vmap(lambda _: Block(a))(jnp.arange(a.layers))  # weights (L, ...)
        self.norm = Norm(a, a.hidden_size)
        self.head = None if a.tied_embeddings else Linear(a.hidden_size, a.vocab_size, bias=False)
        # Kept, saved and counted; no term of the text loss reaches them.
        self.auxiliary = Embedding(a.auxiliary_rows, a.hidden_size) if a.auxiliary_rows else None
        classes = a.diagnostic_classes
        self.diagnostic_head = Linear(a.hidden_size, classes, bias=True) if classes else None

    def embed(self, tokens: Array, positions: Array) -> Array:
        """Input of the first block, (B, T, C) in float32."""
        a = self.architecture
        x = self.embedding(tokens).astype(jnp.float32)
        if a.scale_embeddings:
            x = x * math.sqrt(a.hidden_size)
        return x if self.positions is None else x + self.positions(positions)

    def hidden(
        self,
        tokens: Array,
        dtype: Any = jnp.float32,
        around: Around | None = None,
        documents: Array | None = None,
        sums: Sums | None = None,
    ) -> Array:
        """Tokens (B, T) to the normed output of the last block (B, T, C) in `dtype`.

        `around` wraps one block's function: gradient checkpointing. `documents` (B, T) number the documents of a
        row, which do not see one another. Gradients of the blocks' weights in `sums` are those of `sums`: added to
        them (see `accumulation`).
        """
        a = self.architecture
        length = tokens.shape[1]
        positions = jnp.arange(length) if documents is None else restarted(documents)
        rotations = all_rotations(a, positions)
        local = local_layers(a)
        graph, weights = nnx.split(self.layers)

        def layer(
            x: Array,
            weights: Any,
            is_local: Array | None,
            rotations: list[Rotation] | None,
            documents: Array | None,
        ) -> Array:
            block = nnx.merge(graph, weights)
            rotation, window = layer_view(a, rotations, is_local, length)
            return block(x, rotation, window, dtype, documents)

        around_layer = layer if around is None else around(layer)

        def wrapped(x: Array, weights: Any, is_local: Array | None) -> Array:
            return around_layer(x, weights, is_local, rotations, documents)

        x = self.embed(tokens, positions)
        if sums is None:
            x, _ = lax.scan(lambda x, xs: (wrapped(x, *xs), None), x, (weights, local))
        else:
            x = self._through_adding(wrapped, x, weights, local, sums)
        return self.norm(x).astype(dtype)

    def _through_adding(
        self, wrapped: Callable[..., Array], x: Array, weights: Any, local: Any, sums: Sums
    ) -> Array:
        """x after all layers, whose weights' gradients are added to `sums`."""
        paths = {".".join(("layers", *path)): path for path, _ in nnx.to_flat_state(weights)}
        sums = {name: total for name, total in sums.items() if name in paths}

        def layer(carry: tuple[Array, Sums], xs: Any) -> tuple[Any, None]:
            x, carried = carry
            index, weights, is_local = xs
            arrays = dict(nnx.to_flat_state(weights))
            found = {name: arrays[paths[name]][...] for name in carried}
            found, carried = accumulation.adding(found, carried, index)
            arrays |= {paths[name]: nnx.Param(array) for name, array in found.items()}
            weights = nnx.from_flat_state(list(arrays.items()))
            return (wrapped(x, weights, is_local), carried), None

        layers = jnp.arange(self.architecture.layers)
        (x, carried), _ = lax.scan(layer, (x, sums), (layers, weights, local))
        return accumulation.begun(x, carried, lax.stop_gradient(sums))

    @property
    def head_weight(self) -> Array:
        """The matrix of the language-model head, (V, C)."""
        return self.embedding.weight[...] if self.head is None else self.head.weight[...]

    def logits(self, hidden: Array) -> Array:
        """(..., C) to float32 logits (..., V); the product is in the dtype of `hidden`."""
        return (hidden @ self.head_weight.astype(hidden.dtype).T).astype(jnp.float32)

    def __call__(
        self, tokens: Array, dtype: Any = jnp.float32, documents: Array | None = None
    ) -> Array:
        return self.logits(self.hidden(tokens, dtype, documents=documents))


@functools.lru_cache(maxsize=16)
def _abstract(a: Architecture) -> tuple[Any, tuple[tuple[str, ...], ...]]:
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(a)))
    return graph, tuple(path for path, _ in nnx.to_flat_state(state))


def assemble(a: Architecture, weights: Mapping[str, Any]) -> Decoder:
    """The decoder with `weights` in place, under stacked names (see `stacking`); nothing is copied."""
    graph, paths = _abstract(a)
    flat = [(path, nnx.Param(weights[".".join(path)])) for path in paths]
    return nnx.merge(graph, nnx.from_flat_state(flat))


Rotation = tuple[Array, Array]
"""Cosines and sines (T, D), or (B, T, D), of the rotary embedding, float32."""


def restarted(documents: Array) -> Array:
    """Positions (B, T) counted from the first token of each token's document."""
    index = jnp.arange(documents.shape[1])
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
    return index - lax.cummax(index * begins, axis=1)


def rotate(x: Array, rotation: Rotation) -> Array:
    """Rotary embedding (Su et al. 2021) of x (B, T, heads, D), pairing element i with i + D/2."""
    cos, sin = (table[..., None, :] for table in rotation)  # (T, 1, D)
    y = x.astype(jnp.float32)
    first, second = jnp.split(y, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (y * cos + turned * sin).astype(x.dtype)


def all_rotations(a: Architecture, positions: Array) -> list[Rotation] | None:
    """Rotations of the global layers and, where there are local layers, of those; None without RoPE."""
    if a.positions != "rope":
        return None
    found = [_rotation(positions, a.head_size, a.rope_theta, a.rope_scaling)]
    if a.sliding_window is not None:
        found.append(_rotation(positions, a.head_size, a.rope_local_theta, None))
    return found


def _rotation(
    positions: Array, head_size: int, theta: float, scaling: RopeScaling | None
) -> Rotation:
    frequencies = theta ** -(jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)  # (D/2,)
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        frequencies = _llama3(frequencies, scaling)
    angles = positions.astype(jnp.float32)[..., None] * frequencies  # (T, D/2)
    angles = jnp.concatenate([angles, angles], axis=-1)  # (T, D)
    return jnp.cos(angles), jnp.sin(angles)


def _llama3(frequencies: Array, s: RopeScaling) -> Array:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    turns = s.original_positions * frequencies / (2 * math.pi)
    ramp = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = jnp.clip(ramp, 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / s.factor)


def local_layers(a: Architecture) -> Array | None:
    """Flags (L,) of sliding-window layers; None where every layer is global."""
    flags = [a.is_local(layer) for layer in range(a.layers)]
    return jnp.array(flags) if any(flags) else None


def layer_view(
    a: Architecture, rotations: list[Rotation] | None, is_local: Array | None, length: int
) -> tuple[Rotation | None, Array | None]:
    """The rotation and the window (None: unlimited) of the layer at hand."""
    if is_local is None or a.sliding_window is None:
        return (None if rotations is None else rotations[0]), None
    window = None
    if a.sliding_window < length:
        window = jnp.where(is_local, a.sliding_window, length)
    if rotations is None:
        return None, window
    (cos, sin), (local_cos, local_sin) = rotations
    return (jnp.where(is_local, local_cos, cos), jnp.where(is_local, local_sin, sin)), window


def activate(x: Array, name: str) -> Array:
    """SiLU or tanh-approximated GELU, in float32 as torch's kernels; the backward pass keeps only x."""
    return recomputed(functools.partial(_activated, name), (x,))


def gated(gate: Array, up: Array, name: str) -> Array:
    """``activation(gate) · up``; the backward pass keeps only gate and up."""
    return recomputed(functools.partial(_gated, name), (gate, up))


def _activated(name: str, x: Array) -> Array:
    return _ACTIVATIONS[name](x.astype(jnp.float32)).astype(x.dtype)


def _gated(name: str, gate: Array, up: Array) -> Array:
    return (_ACTIVATIONS[name](gate.astype(jnp.float32)) * up).astype(up.dtype)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def product(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """``x @ W.T + b`` in the dtype of x (B, T, ...), whose last axes are taken as one. The backward pass keeps x and
    the weights as they came: neither a cast nor a turned copy of every layer's, nor joined heads beside the heads
    that attention keeps."""
    return checkpoint_name(_product(x, weight, bias), "product")


@jax.custom_vjp
def _product(x: Array, weight: Array, bias: Array | None) -> Array:
    y = jnp.einsum("bti,oi->bto", _joined(x), weight.astype(x.dtype))
    return y if bias is None else y + bias.astype(x.dtype)


def _product_forward(x: Array, weight: Array, bias: Array | None) -> tuple[Array, Any]:
    return _product(x, weight, bias), (x, weight, bias)


def _product_backward(kept: Any, gradient: Array) -> tuple[Array, Array, Array | None]:
    x, weight, bias = kept
    joined = _joined(x)
    back = jnp.einsum("bto,oi->bti", gradient, weight.astype(x.dtype))
    # XLA on a CPU copies what comes first with its axes turned: the narrower of the two.
    if weight.shape[0] > weight.shape[1]:
        turned = jnp.einsum("bti,bto->io", joined, gradient).T
    else:
        turned = jnp.einsum("bto,bti->oi", gradient, joined)
    # As a product, too: for a sum it would widen 16-bit gradients a second time.
    ones = jnp.ones(gradient.shape[:2], x.dtype)
    summed = None if bias is None else jnp.einsum("bt,bto->o", ones, gradient).astype(bias.dtype)
    return back.reshape(x.shape), turned.astype(weight.dtype), summed


_product.defvjp(_product_forward, _product_backward)


def _joined(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1)
