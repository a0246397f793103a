"""The decoder in JAX: every model that one `Architecture` describes, as Flax NNX modules.

Notable:
- all blocks have the same shapes, so their weights are stacked on a leading axis (L, ...) and one
  block's code runs for all of them (see `blocks`)
- local and global layers run the same code; a flag per layer picks the window and the rotation
- half-split rotary embeddings, as in transformers, with the scalings of `memconsole.plan.models.rotary`
- norms, softmax and loss are in float32; matrices (out, in) are used as ``x @ W.T``
- weights are cast to the compute dtype where they are used, one block at a time; they are float32
  unless the plan stores them in 16 bits or as codes

Letters in shapes: B batch, T sequence, C hidden, H heads, K key-value heads, D head size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from memconsole.plan.models.architecture import Architecture
from memconsole_jax.models import dropout
from memconsole_jax.models.accumulation import Sums
from memconsole_jax.models.attention import causal_attention
from memconsole_jax.models.balance import balancing, current_weight
from memconsole_jax.models.blocks import BlockRunning, assembled, run_blocks, stacked
from memconsole_jax.models.experts import Experts
from memconsole_jax.models.layers import MLP, Embedding, Identity, Linear, Norm
from memconsole_jax.models.rotary import Rotation, all_rotations, restarted, rotate_both


class Attention(nnx.Module):
    """Causal self-attention with grouped key-value heads."""

    def __init__(self, a: Architecture) -> None:
        self.heads, self.kv_heads, self.head_size = a.heads, a.kv_heads, a.head_size
        self.scale, self.cap = a.scale, a.attention_cap
        self.query = Linear(a.hidden_size, a.query_width, a.biases_projections)
        self.key = Linear(a.hidden_size, a.key_width, a.biases_projections)
        self.value = Linear(a.hidden_size, a.key_width, a.biases_projections)
        self.output = Linear(a.query_width, a.hidden_size, a.biases)
        self.joint_norm = a.joint_query_key_norm
        self.query_norm = (
            build_norm(a, a.query_norm_size, of_heads=True) if a.query_key_norm else None
        )
        self.key_norm = build_norm(a, a.key_norm_size, of_heads=True) if a.query_key_norm else None

    def project(self, x: Array, rotation: Rotation | None) -> tuple[Array, Array, Array]:
        """Queries (B, T, H, D), keys and values (B, T, K, D), normalized and rotated."""
        b, t, _ = x.shape
        q, k = self.query(x), self.key(x)
        if self.joint_norm:
            q, k = self.normalize(q, k)
        q = q.reshape(b, t, self.heads, self.head_size)  # (B, T, H, D)
        k = k.reshape(b, t, self.kv_heads, self.head_size)  # (B, T, K, D)
        v = self.value(x).reshape(b, t, self.kv_heads, self.head_size)
        if not self.joint_norm:
            q, k = self.normalize(q, k)
        if rotation is not None:
            q, k = rotate_both(q, k, rotation)
        return q, k, v

    def normalize(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Queries and keys through their norms, if the model has them."""
        if self.query_norm is None or self.key_norm is None:
            return q, k
        return self.query_norm(q), self.key_norm(k)

    def __call__(
        self,
        x: Array,
        rotation: Rotation | None,
        window: Array | None,
        documents: Array | None = None,
    ) -> Array:
        q, k, v = self.project(x, rotation)
        drop = dropout.for_attention()
        # (B, T, H·D) or (B, T, H, D)
        y = causal_attention(q, k, v, self.scale, window, documents, self.cap, drop)
        return self.output(y)  # (B, T, C)


class Block(nnx.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; Gemma 2 and 3 also norm what is added
    to x, and OLMo 2 norms only that. In GPT-NeoX both read the same x."""

    def __init__(self, a: Architecture) -> None:
        self.multiplier, self.parallel = a.residual_multiplier, a.parallel_residual
        self.attention_norm = build_norm(a, a.hidden_size) if a.pre_norms else Identity()
        self.attention = Attention(a)
        self.attention_post_norm = build_norm(a, a.hidden_size) if a.post_norms else None
        self.mlp_norm = build_norm(a, a.hidden_size) if a.pre_norms else Identity()
        self.mlp = Experts(a) if a.experts else build_mlp(a)
        self.mlp_post_norm = build_norm(a, a.hidden_size) if a.post_norms else None

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
        return self.after_attention(x, y, dtype)

    def after_attention(self, x: Array, y: Array, dtype: Any = jnp.float32) -> Array:
        """The rest of the block after attention: adds the attention output y and the MLP's output to x, (B, T, C) each."""
        y = y if self.attention_post_norm is None else self.attention_post_norm(y)
        summed = self.add(x, y)
        y = self.mlp(self.mlp_norm(x if self.parallel else summed).astype(dtype))
        return self.add(summed, y if self.mlp_post_norm is None else self.mlp_post_norm(y))

    def add(self, x: Array, branch: Array) -> Array:
        """The residual stream x with a branch's output added to it."""
        branch = dropout.residual(branch)
        return x + (branch if self.multiplier == 1.0 else self.multiplier * branch.astype(x.dtype))


class Decoder(nnx.Module):
    """Maps tokens (B, T) to logits (B, T, V)."""

    def __init__(self, a: Architecture) -> None:
        self.architecture = a
        self.embedding = Embedding(a.vocab_size, a.hidden_size)
        learned = a.positions == "learned"
        self.positions = Embedding(a.max_positions, a.hidden_size) if learned else None
        self.layers = stacked(a.layers, lambda: Block(a))  # weights (L, ...)
        self.norm = build_norm(a, a.hidden_size, divisor=a.logits_scaling)
        self.head = None if a.tied_embeddings else Linear(a.hidden_size, a.vocab_size, bias=False)
        # These are stored, saved and counted, but the text loss does not depend on them.
        self.auxiliary = Embedding(a.auxiliary_rows, a.hidden_size) if a.auxiliary_rows else None
        classes = a.diagnostic_classes
        self.diagnostic_head = Linear(a.hidden_size, classes, bias=True) if classes else None

    def embed(self, tokens: Array, positions: Array) -> Array:
        """Input of the first block, (B, T, C) in float32."""
        a = self.architecture
        x = self.embedding(tokens).astype(jnp.float32)
        if a.embedding_scale != 1.0:
            x = x * a.embedding_scale
        return x if self.positions is None else x + self.positions(positions)

    def hidden(
        self,
        tokens: Array,
        dtype: Any = jnp.float32,
        running: BlockRunning | None = None,
        documents: Array | None = None,
        sums: Sums | None = None,
    ) -> Array:
        """The normalized output of the last block (B, T, C) in `dtype` for tokens (B, T); see
        `body`."""
        positions = positions_of(tokens.shape[1], documents)
        embedded = dropout.residual(self.embed(tokens, positions))
        return self.body(embedded, dtype, running, documents, sums)

    def body(
        self,
        x: Array,
        dtype: Any = jnp.float32,
        running: BlockRunning | None = None,
        documents: Array | None = None,
        sums: Sums | None = None,
    ) -> Array:
        """The normalized output of the last block in `dtype` for the input of the first one (B, T, C),
        float32.

        `running` says how the blocks run. `documents` (B, T) holds
        document numbers if documents of a row are isolated. Gradients of the blocks' weights named
        in `sums` are added to `sums` (see `accumulation`).
        """
        x = run_decoder_blocks(self.architecture, self.layers, x, dtype, running, documents, sums)
        return self.norm(x).astype(dtype)

    @property
    def head_weight(self) -> Array:
        """The matrix of the language-model head, (V, C)."""
        return self.embedding.weight[...] if self.head is None else self.head.weight[...]

    def logits(self, hidden: Array) -> Array:
        """(..., C) to float32 logits (..., V); the product is in the dtype of `hidden`."""
        logits = (hidden @ self.head_weight.astype(hidden.dtype).T).astype(jnp.float32)
        cap = self.architecture.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def __call__(
        self, tokens: Array, dtype: Any = jnp.float32, documents: Array | None = None
    ) -> Array:
        return self.logits(self.hidden(tokens, dtype, documents=documents))


def run_decoder_blocks(
    a: Architecture,
    layers: Any,
    x: Array,
    dtype: Any = jnp.float32,
    running: BlockRunning | None = None,
    documents: Array | None = None,
    sums: Sums | None = None,
) -> Array:
    """The output of the last of the stacked blocks `layers`; see `Decoder.body`."""
    length = x.shape[1]
    flags = layer_flags(a)
    dropout_bits, dropout_rates = dropout.for_layers(a.layers), dropout.current_rates()

    def run_block(
        block: Block,
        x: Array,
        of_layer: Any,
        rotations: list[Rotation] | None,
        documents: Array | None,
        balance: Array | None,
    ) -> Array:
        flag, bits = (of_layer, None) if dropout_bits is None else of_layer
        rotation, window = rotation_and_window(a, rotations, flag, length)
        with dropout.active(dropout_rates, bits), balancing(balance):
            return block(x, rotation, window, dtype, documents)

    rotations = all_rotations(a, positions_of(length, documents), length)
    shared = rotations, documents, current_weight()
    of_layers = flags if dropout_bits is None else (flags, dropout_bits)
    return run_blocks(layers, x, run_block, running, sums, of_layers, shared)


def positions_of(length: int, documents: Array | None) -> Array:
    """Positions (T,) of a row, or (B, T) counted from the beginning of each document."""
    return jnp.arange(length) if documents is None else restarted(documents)


def assemble(a: Architecture, weights: Mapping[str, Any]) -> Decoder:
    """The decoder with `weights`, which have stacked names (see `stacking`). Nothing is copied."""
    return assembled(Decoder, a, weights)


def build_mlp(a: Architecture) -> MLP:
    return MLP(a.hidden_size, a.intermediate_size, a.activation, gated=a.gated_mlp, bias=a.biases)


def build_norm(a: Architecture, size: int, *, of_heads: bool = False, divisor: float = 1.0) -> Norm:
    """A norm over `size` elements; its result is divided by `divisor`. Norms of heads (`of_heads`) are never centred and
    have no bias."""
    return Norm(
        size,
        a.norm_eps,
        centred=a.norm == "layernorm" and not of_heads,
        offset=1.0 if a.norm_unit_offset else 0.0,
        bias=a.biases and not of_heads,
        divisor=divisor,
    )


def layer_flags(a: Architecture) -> Array | None:
    """Flags (L,) of the layers with a sliding window, or of those that do not rotate if there is no window; None if no layer
    has one."""
    if not a.mixes_layers:
        return None
    flags = [
        a.is_local(layer) if a.sliding_window is not None else not a.is_rotated(layer)
        for layer in range(a.layers)
    ]
    return jnp.array(flags) if any(flags) else None


def rotation_and_window(
    a: Architecture, rotations: list[Rotation] | None, flag: Array | None, length: int
) -> tuple[Rotation | None, Array | None]:
    """The rotation and the window (None: unlimited) of a layer with this flag of `layer_flags`."""
    if flag is None:
        return (None if rotations is None else rotations[0]), None
    window = None
    if a.sliding_window is not None and a.sliding_window < length:
        window = jnp.where(flag, a.sliding_window, length)
    if rotations is None:
        return None, window
    usual, others = rotations
    chosen = (jnp.where(flag, other, one) for one, other in zip(usual, others, strict=True))
    return tuple(chosen), window
