"""The decoder in torch: every model that one `Architecture` describes.

Worth knowing before reading:
- module names spell the canonical parameter names of `memconsole.plan.models.architecture.parameters`;
- rotary positions rotate the two halves of a head, as Hugging Face checkpoints expect;
- norm statistics, the residual stream and the rotation are fp32 in any autocast precision;
- attention is `F.scaled_dot_product_attention`, or `capped_attention` if scores are capped or weights are
  dropped: the scores of all queries never exist at once;
- `forward` ends before the head, so that a loss can compute the head's matmul in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memconsole.plan.models.architecture import Architecture, parameters
from memconsole_torch.models.capped_attention import capped_attention
from memconsole_torch.models.experts import Experts
from memconsole_torch.models.linear import Linear, compute_dtype, linear
from memconsole_torch.models.packing import masks, restarted, restarting
from memconsole_torch.models.table import table

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of every position's angles, fp32 (T, R / 2) each for the R elements of a head that rotate; (B, 1, T,
R / 2) if positions restart within a row."""
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
        own = dict(self.named_parameters())
        for parameter in parameters(a):
            own[parameter.name].requires_grad_(parameter.used)

    @property
    def head_weight(self) -> Tensor:
        """The matrix from hidden states to logits: the embedding if they are tied."""
        tied = self.architecture.tied_embeddings
        return self.embedding.weight if tied else self.head.weight  # (V, H)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Final hidden states (B, T, H) of `tokens` (B, T), in the compute precision. `documents` (B, T) number
        the documents of a row, which do not see one another."""
        # The embedded tokens have no name here, so the first block's output replaces them in memory.
        return self.norm(
            through(self.architecture, self.layers, self.embed(tokens, documents), documents)
        )

    def embed(self, tokens: Tensor, documents: Tensor | None = None, start: int = 0) -> Tensor:
        """Input of the first block, fp32 (B, T, H). `start` is the position of the first token."""
        a = self.architecture
        x = self.embedding(tokens).float()  # (B, T, H)
        if a.embedding_scale != 1.0:
            x = x * a.embedding_scale  # rounded to the embedding's fp32, as transformers does
        if a.positions == "learned":
            own = documents is not None
            x = x + (
                self.positions(restarted(documents))
                if own
                else self.positions.weight[start : start + tokens.shape[1]]
            )
        return x

    def logits(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Next-token logits (B, T, V) of `tokens` (B, T), which tests compare with other implementations."""
        return self.scores(self(tokens, documents))

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of final hidden states (..., H)."""
        found = linear(hidden, self.head_weight)
        cap = self.architecture.logit_cap
        return found if cap is None else cap * (found / cap).tanh()


def through(
    a: Architecture, layers: nn.ModuleList, x: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Run x (B, T, H), fp32, through all blocks."""
    length = x.shape[1]
    wide = rotation(a, length, local=False, device=x.device)
    near = rotation(a, length, local=True, device=x.device)
    whole, window = None, None
    if documents is None:
        window = sliding_window_mask(a, length, compute_dtype(x), x.device)
    else:
        wide, near = restarting(a, documents, wide, near)
        whole, window = masks(a, documents, compute_dtype(x))
    for index, block in enumerate(layers):
        local = a.is_local(index)
        angles = (near if local else wide) if a.is_rotated(index) else None
        x = block(x, angles, window if local else whole)
    return x


class Block(nn.Module):
    """Attention, then MLP, each applied to the normed residual stream and added to it; OLMo 2 norms what is added instead,
    Gemma 2 and 3 both. In GPT-NeoX both read the stream as it enters the block."""

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

    def forward(self, x: Tensor, positions: Rotation | None, mask: Tensor | None) -> Tensor:
        if self.parallel:
            return self.feed(x, self.attention.joined(self.heads(x, positions, mask)))
        return self.feed(x, self.attention(self.attention_norm(x), positions, mask))

    def heads(self, x: Tensor, positions: Rotation | None, mask: Tensor | None) -> Tensor:
        """The output of each of attention's heads (B, A, T, D) for x (B, T, H), before their projection."""
        return self.attention.heads(self.attention_norm(x), positions, mask)

    def feed(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output to the stream (B, T, H), then the MLP's output for the sum, or for the stream
        itself if both are parallel."""
        if self.parallel:
            fed = self.fed(x)  # before the sum, which is fp32
            return self.added(self.added(x, self.attention_post_norm(attended)), fed)
        x = self.added(x, self.attention_post_norm(attended))  # (B, T, H)
        return self.added(x, self.fed(x))

    def fed(self, x: Tensor) -> Tensor:
        """What the MLP adds to the stream for x (B, T, H)."""
        return self.mlp_post_norm(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return,unused-ignore]

    def added(self, x: Tensor, branch: Tensor) -> Tensor:
        if self.multiplier == 1.0:
            return x + branch
        return torch.add(x, branch, alpha=self.multiplier)


class Attention(nn.Module):
    """Causal attention with grouped keys and values. `mask` may limit it to a window or a
    document."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.head_size = a.head_size
        self.scale, self.cap = a.scale, a.attention_cap
        self.joint_norm = a.joint_query_key_norm
        self.dropout: Callable[[], tuple[int, float] | None] = _drops_nothing
        """Returns key and rate of the dropout mask of the attention weights; None if nothing is dropped now."""
        self.query = Linear(a.hidden_size, a.query_width, bias=a.biases_projections)
        self.key = Linear(a.hidden_size, a.key_width, bias=a.biases_projections)
        self.value = Linear(a.hidden_size, a.key_width, bias=a.biases_projections)
        self.output = Linear(a.query_width, a.hidden_size, bias=a.biases)
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if a.query_key_norm:
            self.query_norm = Norm(a, a.query_norm_size, of_heads=True)
            self.key_norm = Norm(a, a.key_norm_size, of_heads=True)

    def forward(self, x: Tensor, positions: Rotation | None, mask: Tensor | None) -> Tensor:
        return self.joined(self.heads(x, positions, mask))

    def heads(self, x: Tensor, positions: Rotation | None, mask: Tensor | None) -> Tensor:
        """The output of each head (B, A, T, D) for x (B, T, H)."""
        return self.attended(*self.project(x, positions), mask)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The output of each head (B, A, T, D); see `attend`."""
        drop = self.dropout()
        if self.cap is None and drop is None:
            return attend(q, k, v, mask, self.scale)
        found: Tensor = capped_attention(
            q, k, v, mask, self.scale, self.cap or 0.0, *(drop or (0, 0.0))
        )
        return found

    def project(self, x: Tensor, positions: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, A, T, D) and keys, and values (B, K, T, D), of x (B, T, H)."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_size)
        if self.joint_norm:
            q, k = self.query(x), self.key(x)
            q, k = self.query_norm(q).view(heads), self.key_norm(k).view(heads)
        else:
            q = self.query_norm(self.query(x).view(heads))
            k = self.key_norm(self.key(x).view(heads))
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # (B, A, T, D), (B, K, T, D)
        v = self.value(x).view(heads).transpose(1, 2)  # (B, K, T, D)
        if positions is not None:
            q, k = rotate(q, positions), rotate(k, positions)
        return q, k, v

    def joined(self, attended: Tensor) -> Tensor:
        """The output projection (B, T, H) of all heads (B, A, T, D)."""
        batch, _, length, _ = attended.shape
        return self.output(attended.transpose(1, 2).reshape(batch, length, -1))


def _drops_nothing() -> None:
    return None


class MLP(nn.Module):
    """down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate."""

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


class Norm(nn.Module):
    """LayerNorm, or RMSNorm with weight `w` or Gemma's `1 + w`; statistics in fp32.

    The result is in the compute precision, so that several matmuls share one copy of it. It is divided by `divisor`.
    """

    def __init__(
        self, a: Architecture, size: int, *, of_heads: bool = False, divisor: float = 1.0
    ) -> None:
        super().__init__()
        self.divisor = divisor
        self.eps = a.norm_eps
        self.centered = a.norm == "layernorm" and not of_heads
        self.unit_offset = a.norm_unit_offset
        self.weight = nn.Parameter(torch.empty(size))
        bias = a.biases and not of_heads
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight if self.unit_offset else self.weight
        if self.divisor != 1.0:
            weight = weight / self.divisor
        dtype = compute_dtype(x)
        if self.centered:
            # Several devices gather weights in 16 bits.
            bias = None if self.bias is None else self.bias.float()
            y = F.layer_norm(x.float(), weight.shape, weight.float(), bias, self.eps)
            return y.to(dtype)
        if (
            x.is_cuda and x.dtype == weight.dtype and self.bias is None
        ):  # the fused kernel also keeps only x and 1/rms
            return F.rms_norm(x, weight.shape, weight, self.eps).to(dtype)
        y = RMSNorm.apply(x, weight, self.eps, dtype)
        return y if self.bias is None else y + self.bias.to(dtype)


class Unnormed(nn.Module):
    """In place of a norm: only casts to the compute precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(compute_dtype(x))


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019, eq. 4), keeping only x and 1/rms.

    Outside CUDA, torch's own version is composed of elementwise operations, which keep a second
    copy of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # (..., 1)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        y = (wide * inverse).mul_(weight)
        # torch 2.11 compiles a cast that changes nothing here into wrong gradients.
        return y if y.dtype == dtype else y.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        normed = (x.float() * inverse).reshape(-1, size)
        gradient = gradient.float().reshape(-1, size)
        work = gradient * normed
        weight_gradient = work.sum(0) if ctx.needs_input_grad[1] else None
        along = torch.mv(work, weight.float()).div_(size)[
            :, None
        ]  # mean(gradient · weight · normed)
        torch.mul(gradient, weight, out=work)
        work.addcmul_(normed, along, value=-1).mul_(inverse.reshape(-1, 1))
        x_gradient = work.view(x.shape)
        return x_gradient.to(x.dtype), weight_gradient, None, None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Causal attention of queries (B, A, T, D) over keys and values (B, K, T, D), A a multiple of
    K.

    On a CPU, and with CUDA's flash kernel (16 bits, no mask), grouped keys are read in place.
    Elsewhere `enable_gqa` would fall back to a kernel that materializes T x T scores, so keys and
    values are repeated.
    """
    groups = q.shape[1] // k.shape[1]
    flash = (
        flash_on_cuda and q.is_cuda and mask is None and q.dtype in (torch.bfloat16, torch.float16)
    )
    shared = groups > 1 and (q.device.type == "cpu" or flash)
    if groups > 1 and not shared:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
    )


def rotation(a: Architecture, length: int, *, local: bool, device: torch.device) -> Rotation | None:
    """Cosines and sines of positions 0 … length - 1 (Su et al. 2021, §3.2.2); None if positions are
    learned."""
    if a.positions == "learned":
        return None
    turns = torch.tensor(
        a.angles(length, local=local), dtype=torch.float32, device=device
    )  # (R / 2,)
    index = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(index, turns)  # (T, R / 2)
    cos, sin = angles.cos(), angles.sin()
    factor = a.rotation_factor(local=local)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x: Tensor, positions: Rotation) -> Tensor:
    """Rotate each pair (first half, second half) of x (B, A, T, D) by its position's angle; or of the first R elements
    of each head, if the others do not rotate."""
    if torch.compiler.is_compiling():
        # The compiler lays new tensors out densely, and attention's output as its queries. With these dimensions the
        # output needs no second copy for the projection.
        # (T, 1, R / 2), or (B, T, 1, R / 2) where documents have positions of their own
        cos, sin = (a[:, None] if a.dim() == 2 else a.transpose(1, 2) for a in positions)
        return turned(x.transpose(1, 2), cos, sin, 1.0).transpose(1, 2)
    found: Tensor = Rotated.apply(x, *positions)
    return found


class Rotated(torch.autograd.Function):
    """The rotation in four passes over half of x each; the backward pass rotates by the opposite angle.

    Composed of autograd's own operations it would take three times as many passes. The result has the strides
    of x, so its gradient needs no copy before the gradient of the projection is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(gradient, cos, sin, -1.0), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, sense: float) -> Tensor:
    """x rotated by its angles, or with `sense` = -1 by their opposites; computed in fp32."""
    size = 2 * cos.shape[-1]
    first, second = x[..., :size].float().chunk(2, dim=-1)  # (B, A, T, R / 2)
    if torch.compiler.is_compiling():  # the compiler fuses these, and cannot write into halves
        ahead, across = first * cos - sense * second * sin, second * cos + sense * first * sin
        return torch.cat((ahead.to(x.dtype), across.to(x.dtype), x[..., size:]), dim=-1)
    whole = torch.empty_like(x, dtype=torch.float32)
    one, other, rest = whole.split((size // 2, size // 2, x.shape[-1] - size), dim=-1)
    torch.mul(first, cos, out=one).addcmul_(second, sin, value=-sense)
    torch.mul(second, cos, out=other).addcmul_(first, sin, value=sense)
    rest.copy_(x[..., size:])
    return whole.to(x.dtype)


def sliding_window_mask(
    a: Architecture, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Additive mask (T, T) of local layers; None if the window covers the whole row.

    It is additive and in the compute precision, because otherwise every layer would convert it and
    keep its own copy.
    """
    if a.sliding_window is None or a.sliding_window >= length:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    seen = seen.tril().triu(1 - a.sliding_window)
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill(~seen, -math.inf)
