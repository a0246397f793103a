"""The regression transformer as Flax NNX modules, built from one `Regressor`: windows to vectors.

Blocks are post-norm with causal attention. Only the last position is projected to the outputs.
Residual stream, norms and outputs are float32; matrices inside the blocks and at the input are
multiplied in the compute dtype.

Letters in shapes: B batch, T window, C hidden, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from memconsole.plan.models.regressor import Regressor
from memconsole_jax.models import dropout
from memconsole_jax.models.accumulation import Sums
from memconsole_jax.models.attention import causal_attention
from memconsole_jax.models.blocks import BlockRunning, assembled, run_blocks, stacked
from memconsole_jax.models.layers import MLP, Embedding, Linear, Norm


class Attention(nnx.Module):
    """Causal self-attention without biases."""

    def __init__(self, r: Regressor) -> None:
        self.heads = r.heads
        self.query = Linear(r.hidden_size, r.hidden_size, bias=False)
        self.key = Linear(r.hidden_size, r.hidden_size, bias=False)
        self.value = Linear(r.hidden_size, r.hidden_size, bias=False)
        self.output = Linear(r.hidden_size, r.hidden_size, bias=False)

    def __call__(self, x: Array) -> Array:
        b, t, c = x.shape
        heads = (b, t, self.heads, c // self.heads)
        q, k, v = (part(x).reshape(heads) for part in (self.query, self.key, self.value))
        y = causal_attention(q, k, v, heads[-1] ** -0.5, window=None)
        return self.output(y)  # (B, T, C)


class Block(nnx.Module):
    """``norm(x + attention(x))``, then ``norm(x + mlp(x))``."""

    def __init__(self, r: Regressor) -> None:
        self.attention = Attention(r)
        self.attention_norm = Norm(r.hidden_size, r.norm_eps, centred=True, bias=True)
        self.mlp = MLP(r.hidden_size, r.intermediate_size, "gelu_tanh", gated=False, bias=True)
        self.mlp_norm = Norm(r.hidden_size, r.norm_eps, centred=True, bias=True)

    def __call__(self, x: Array, dtype: Any = jnp.float32) -> Array:
        """The residual stream x (B, T, C) stays float32; attention and the MLP are in `dtype`."""
        x = self.attention_norm(x + dropout.residual(self.attention(x.astype(dtype))))
        return self.mlp_norm(x + dropout.residual(self.mlp(x.astype(dtype))))


class Transformer(nnx.Module):
    """Maps windows (B, T, features) to outputs (B, outputs)."""

    def __init__(self, r: Regressor) -> None:
        self.model = r
        self.input = Linear(r.features, r.hidden_size, bias=True)
        self.positions = Embedding(r.max_positions, r.hidden_size)
        self.layers = stacked(r.layers, lambda: Block(r))  # weights (L, ...)
        self.head = Linear(r.hidden_size, r.outputs, bias=True)

    def __call__(
        self,
        windows: Array,
        dtype: Any = jnp.float32,
        running: BlockRunning | None = None,
        sums: Sums | None = None,
    ) -> Array:
        """Outputs (B, outputs). `running` says how the blocks run.
        Gradients of the blocks' weights named in `sums` are added to `sums` (see
        `accumulation`)."""
        x = self.input(windows.astype(dtype)).astype(jnp.float32)
        x = x + self.positions.weight[...][: x.shape[1]].astype(jnp.float32)  # (B, T, C)
        x = dropout.residual(x)
        dropout_bits, rates = dropout.for_layers(self.model.layers), dropout.current_rates()

        def run_block(block: Block, x: Array, bits: Array | None) -> Array:
            with dropout.active(rates, bits):
                return block(x, dtype)

        x = run_blocks(self.layers, x, run_block, running, sums, dropout_bits)
        return self.head(x[:, -1:])[:, 0]


def assemble(r: Regressor, weights: Mapping[str, Any]) -> Transformer:
    """The model with `weights`, which have stacked names (see `stacking`). Nothing is copied."""
    return assembled(Transformer, r, weights)
