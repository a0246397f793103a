"""The decoder in torch: every model that one `Architecture` describes.

Worth knowing before reading:
- module names spell the canonical parameter names of `memconsole.plan.models.architecture.parameters`;
- rotary embeddings pair element i of a head with element i + R / 2, as Hugging Face checkpoints expect;
- the residual stream, the statistics of norms and the rotation are fp32 in any autocast precision;
- attention is `F.scaled_dot_product_attention`, or `capped_attention` if scores are capped or attention weights are
  dropped. Neither holds the scores of all queries at once;
- `Decoder.forward` ends before the head, so that a loss can compute the head's matmul in chunks.

Letters in shapes: B rows, T tokens, H hidden size, V vocabulary, A heads, K key-value heads, D head size, R elements of a
head that rotate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memconsole.plan.models.architecture import Architecture, parameters
from memconsole_torch.models.capped_attention import capped_attention
from memconsole_torch.models.experts import Experts
from memconsole_torch.models.linear import Linear, compute_dtype, linear
from memconsole_torch.models.norms import Norm, Unnormed
from memconsole_torch.models.packing import (
    document_masks,
    document_positions,
    document_rotations,
)
from memconsole_torch.models.rotary import Rotation, rotate_both, rotation_of
from memconsole_torch.models.table import table

flash_on_cuda = True
"""Whether the GPU is new enough for torch's flash kernel (compute capability 8.0). `engine.create` sets it."""


class Decoder(nn.Module):
    """Maps token ids to final hidden states; `scores` applies the head."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.architecture = self.model = a
        self.embedding = table(a.vocab_size, a.hidden_size)
        if a.positions == "learned":
            self.positions = table(a.max_positions, a.hidden_size)
        self.layers = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.norm = Norm(a, a.hidden_size, divisor=a.logits_scaling)
        if not a.tied_embeddings:
            self.head = Linear(a.hidden_size, a.vocab_size, bias=False)
        if a.auxiliary_rows:
            self.auxiliary = table(a.auxiliary_rows, a.hidden_size)
        if a.diagnostic_classes:
            self.diagnostic_head = Linear(a.hidden_size, a.diagnostic_classes)
        weights = dict(self.named_parameters())
        for parameter in parameters(a):
            weights[parameter.name].requires_grad_(parameter.used)

    @property
    def head_weight(self) -> Tensor:
        """The matrix (V, H) from hidden states to logits. It is the embedding if the two are tied."""
        tied = self.architecture.tied_embeddings
        return self.embedding.weight if tied else self.head.weight

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Final hidden states (B, T, H) of `tokens` (B, T), in the compute precision. `documents` (B, T) holds the number
        of each token's document within its row; documents do not see one another."""
        # No variable holds the embedded tokens here, so that they are freed when the first block has read them.
        return self.norm(
            run_blocks(self.architecture, self.layers, self.embed(tokens, documents), documents)
        )

    def embed(self, tokens: Tensor, documents: Tensor | None = None, start: int = 0) -> Tensor:
        """Input of the first block, fp32 (B, T, H). `start` is the position of the first token of rows without
        `documents`."""
        a = self.architecture
        x = self.embedding(tokens).float()  # (B, T, H)
        if a.embedding_scale != 1.0:
            x = x * a.embedding_scale  # rounded to the embedding's fp32, as transformers does
        if a.positions == "learned":
            if documents is None:
                return x + self.positions.weight[start : start + tokens.shape[1]]
            return x + self.positions(document_positions(documents))
        return x

    def logits(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Next-token logits (B, T, V) of `tokens` (B, T)."""
        return self.scores(self(tokens, documents))

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of final hidden states (..., H). Gemma 2 caps them: cap · tanh(logits / cap)."""
        logits = linear(hidden, self.head_weight)
        cap = self.architecture.logit_cap
        return logits if cap is None else cap * (logits / cap).tanh()


def run_blocks(
    a: Architecture, blocks: nn.ModuleList, x: Tensor, documents: Tensor | None = None
) -> Tensor:
    """The output of the last block, fp32 (B, T, H), for the input x of the first one. See `Decoder.forward`."""
    length = x.shape[1]
    global_rotation = rotation_of(a, length, local=False, device=x.device)
    local_rotation = rotation_of(a, length, local=True, device=x.device)
    if documents is None:
        global_mask, local_mask = None, sliding_window_mask(a, length, compute_dtype(x), x.device)
    else:
        global_rotation, local_rotation = document_rotations(
            a, documents, global_rotation, local_rotation
        )
        global_mask, local_mask = document_masks(a, documents, compute_dtype(x))
    for index, block in enumerate(blocks):
        local = a.is_local(index)
        rotation = local_rotation if local else global_rotation
        mask = local_mask if local else global_mask
        x = block(x, rotation if a.is_rotated(index) else None, mask)
    return x


class Block(nn.Module):
    """Attention, then MLP. Each reads the normed residual stream, and its output is added to the stream.

    OLMo 2 norms the outputs instead of the stream, Gemma 2 and 3 norm both. In GPT-NeoX (`parallel_residual`) the MLP reads
    the same stream as attention.
    """

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.multiplier, self.parallel = a.residual_multiplier, a.parallel_residual
        self.attention_norm = Norm(a, a.hidden_size) if a.pre_norms else Unnormed()
        self.attention = Attention(a)
        self.mlp_norm = Norm(a, a.hidden_size) if a.pre_norms else Unnormed()
        self.mlp = Experts(a) if a.experts else MLP(a)
        self.attention_post_norm: nn.Module = nn.Identity()
        self.mlp_post_norm: nn.Module = nn.Identity()
        if a.post_norms:
            self.attention_post_norm = Norm(a, a.hidden_size)
            self.mlp_post_norm = Norm(a, a.hidden_size)

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None) -> Tensor:
        """The residual stream (B, T, H), fp32, after the block. `rotation` is None in layers that do not rotate; `mask` is
        that of `causal_attention`."""
        if self.parallel:
            attended = self.attention.project_output(self.attention_heads(x, rotation, mask))
        else:
            attended = self.attention(self.attention_norm(x), rotation, mask)
        return self.after_attention(x, attended)

    def attention_heads(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None) -> Tensor:
        """The output of each attention head (B, A, T, D) for x (B, T, H), before the output projection."""
        return self.attention.heads(self.attention_norm(x), rotation, mask)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the block: add attention's output `attended` to the residual stream x, both (B, T, H), then the
        MLP's output."""
        if self.parallel:
            # The MLP runs before the sum exists, because the sum is fp32 and `attended` may have 16 bits.
            mlp_output = self.mlp_output(x)
            x = self.add(x, self.attention_post_norm(attended))
            return self.add(x, mlp_output)
        x = self.add(x, self.attention_post_norm(attended))
        return self.add(x, self.mlp_output(x))

    def mlp_output(self, x: Tensor) -> Tensor:
        """What the MLP adds to the residual stream x (B, T, H)."""
        return self.mlp_post_norm(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return,unused-ignore]

    def add(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the output of attention or of the MLP to the residual stream. Granite scales it by `residual_multiplier`."""
        if self.multiplier == 1.0:
            return x + output
        return torch.add(x, output, alpha=self.multiplier)


class Attention(nn.Module):
    """Causal self-attention. Groups of heads may share keys and values (Ainslie et al. 2023)."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.head_size = a.head_size
        self.scale, self.cap = a.scale, a.attention_cap
        self.joint_norm = a.joint_query_key_norm
        self.dropout: Callable[[], tuple[int, float] | None] = _no_dropout
        """Returns the key and the rate of this step's dropout of the attention weights, or None if nothing is dropped."""
        self.query = Linear(a.hidden_size, a.query_width, bias=a.biases_projections)
        self.key = Linear(a.hidden_size, a.key_width, bias=a.biases_projections)
        self.value = Linear(a.hidden_size, a.key_width, bias=a.biases_projections)
        self.output = Linear(a.query_width, a.hidden_size, bias=a.biases)
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if a.query_key_norm:
            self.query_norm = Norm(a, a.query_norm_size, of_heads=True)
            self.key_norm = Norm(a, a.key_norm_size, of_heads=True)

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None) -> Tensor:
        """The output (B, T, H) for the normed stream x (B, T, H)."""
        return self.project_output(self.heads(x, rotation, mask))

    def heads(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None) -> Tensor:
        """The output of each head (B, A, T, D) for x (B, T, H)."""
        return self.attend(*self.project(x, rotation), mask)

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, A, T, D), keys and values (B, K, T, D) of x (B, T, H). Queries and keys are normed, if the
        architecture has norms for them, and rotated."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_size)
        if self.joint_norm:  # of all heads together
            q, k = self.query(x), self.key(x)
            q, k = self.query_norm(q).view(heads), self.key_norm(k).view(heads)
        else:
            q = self.query_norm(self.query(x).view(heads))
            k = self.key_norm(self.key(x).view(heads))
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # (B, A, T, D), (B, K, T, D)
        v = self.value(x).view(heads).transpose(1, 2)  # (B, K, T, D)
        if rotation is not None:
            q, k = rotate_both(q, k, rotation)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The output of each head (B, A, T, D). `mask` is that of `causal_attention`."""
        drop = self.dropout()
        if self.cap is None and drop is None:
            return causal_attention(q, k, v, mask, self.scale)
        output: Tensor = capped_attention(
            q, k, v, mask, self.scale, self.cap or 0.0, *(drop or (0, 0.0))
        )
        return output

    def project_output(self, heads: Tensor) -> Tensor:
        """The output projection (B, T, H) of all heads (B, A, T, D)."""
        batch, _, length, _ = heads.shape
        return self.output(heads.transpose(1, 2).reshape(batch, length, -1))


def _no_dropout() -> None:
    return None


class MLP(nn.Module):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6), or
    down(activation(up(x))) without a gate."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.silu = a.activation == "silu"
        self.approximate = "none" if a.activation == "gelu" else "tanh"
        self.gated = a.gated_mlp
        if a.gated_mlp:
            self.gate = Linear(a.hidden_size, a.intermediate_size, bias=a.biases)
        self.up = Linear(a.hidden_size, a.intermediate_size, bias=a.biases)
        self.down = Linear(a.intermediate_size, a.hidden_size, bias=a.biases)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))

    def activation(self, x: Tensor) -> Tensor:
        return F.silu(x) if self.silu else F.gelu(x, approximate=self.approximate)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Causal attention of queries (B, A, T, D) over keys and values (B, K, T, D), where A is a multiple of K.

    `mask`, (T, T) or (B, 1, T, T), is added to the scores and must itself hide later keys.

    On a CPU, and with CUDA's flash kernel (16 bits, no mask), the heads of a group read the same keys and values. Other
    kernels with `enable_gqa` would hold the T x T scores, so keys and values are repeated for them.
    """
    groups = q.shape[1] // k.shape[1]
    half_precision = q.dtype in (torch.bfloat16, torch.float16)
    flash = flash_on_cuda and q.is_cuda and mask is None and half_precision
    shared = groups > 1 and (q.device.type == "cpu" or flash)
    if groups > 1 and not shared:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
    )


def sliding_window_mask(
    a: Architecture, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The mask (T, T) that is added to the scores of local layers: 0 for the keys that a query may see, else -inf. None if
    the window covers the whole row.

    Its dtype is the compute precision. Every layer would convert a mask of bools or of another precision, and keep its own
    copy.
    """
    if a.sliding_window is None or a.sliding_window >= length:
        return None
    visible = torch.ones(length, length, dtype=torch.bool, device=device)
    visible = visible.tril().triu(1 - a.sliding_window)
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill(~visible, -math.inf)
