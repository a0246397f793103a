"""What one decoder block keeps for its backward pass, tensor by tensor, in bytes per token.

A block is priced as `Block`: terms linear in tokens and, where attention scores exist as a matrix,
terms per token and key. Widths in the comments are elements per token: h hidden, q heads·head_size,
k kv_heads·head_size, f intermediate, a heads.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memconsole.plan.architecture import Architecture


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one block. `*_scores` are per token and key: multiply by tokens × sequence_length."""

    kept: int
    """Kept from forward to backward under the plan's checkpointing, per token."""
    kept_scores: int
    recomputed: int
    """Kept while one checkpointed block runs its backward pass, per token; 0 without checkpointing."""
    recomputed_scores: int
    forward: int
    """Short-lived at the widest point of the forward pass, per token."""
    forward_scores: int
    backward: int
    """Short-lived gradients at the widest point of the backward pass, per token."""
    backward_scores: int


@lru_cache(maxsize=1024)
def torch_block(a: Architecture, precision: str, checkpointing: str, adapters: bool) -> Block:
    """A block of the torch decoder: fused attention, so scores never exist."""
    h, q, k, f = a.hidden_size, a.query_width, a.key_width, a.intermediate_size
    c = 4 if precision == "fp32" else 2
    # Norm: its input (the residual stream, fp32), its statistic, and its output as the next matmul's input.
    norm = h * 4 + 4 * (2 if a.norm == "layernorm" else 1) + h * c
    attention = (q + 2 * k) * c + q * c + 4 * a.heads  # rotated q and k, v; output; log-sum-exp
    head_norms = (q + k) * c + 4 * (a.heads + a.kv_heads) if a.query_key_norm else 0
    gate = 3 * f * c if a.gated_mlp else f * c  # gate, activated gate, up; or the GELU's input
    mlp = gate + f * c  # and the input of down
    post = 2 * (h * c + 4) if a.post_norms else 0
    everything = 2 * norm + attention + head_norms + mlp + post
    if adapters:
        everything += 4 * (4 * h + q + f)  # each adapter keeps its own fp32 copy of its input
    matmuls = (q + 2 * k + h + (2 if a.gated_mlp else 1) * f + h) * c + q * c + 4 * a.heads
    kept = {"none": everything, "selective": h * 4 + matmuls, "full": h * 4}[checkpointing]
    recomputed = 0 if checkpointing == "none" else max(0, everything - kept)
    return Block(
        kept=kept,
        kept_scores=0,
        recomputed=recomputed,
        recomputed_scores=0,
        forward=2 * f * c + h * 4,
        forward_scores=0,
        backward=3 * f * c + 2 * h * 4,
        backward_scores=0,
    )


@lru_cache(maxsize=1024)
def jax_block(a: Architecture, precision: str, checkpointing: str, adapters: bool) -> Block:
    """A block of the JAX decoder under scan: XLA attention materializes its scores."""
    h, q, k, f = a.hidden_size, a.query_width, a.key_width, a.intermediate_size
    c = 4 if precision == "fp32" else 2
    scores = a.heads * 4
    gate = 3 * f * c if a.gated_mlp else 2 * f * c
    everything = 4 * h * 2 + 2 * h * c + (2 * q + 2 * k) * c + q * c + gate + f * c
    if adapters:
        everything += 4 * (4 * h + q + f)
    matmuls = (q + 2 * k + h + (2 if a.gated_mlp else 1) * f + h) * c
    kept = {"none": everything, "selective": h * 4 + matmuls, "full": h * 4}[checkpointing]
    kept_scores = scores if checkpointing == "none" else 0
    return Block(
        kept=kept,
        kept_scores=kept_scores,
        recomputed=0 if checkpointing == "none" else max(0, everything - kept),
        recomputed_scores=0 if checkpointing == "none" else scores,
        forward=2 * f * c + h * 4,
        forward_scores=2 * scores,
        backward=3 * f * c + 2 * h * 4,
        backward_scores=2 * scores,
    )
