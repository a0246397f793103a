"""What one block of the JAX decoder keeps for its backward pass, tensor by tensor, in bytes per token.

Follows the decoder operation by operation. Widths in the comments are elements per
token: h hidden, q heads × head_size, k kv_heads × head_size, f intermediate; c bytes of a compute element.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memconsole.plan.architecture import Architecture


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one block. `*_scores` are per token and key: multiply by tokens × sequence_length."""

    element: int
    """Bytes of one element of the tensors between matmuls."""
    everything: int
    """Kept without checkpointing, per token."""
    kept: int
    """Kept from forward to backward under the plan's checkpointing, per token."""
    kept_scores: int = 0
    recomputed: int = 0
    """Kept besides while a checkpointed block runs its backward pass, per token."""
    recomputed_scores: int = 0
    passing: int
    """Short-lived at the widest point of a forward pass that keeps nothing, per token."""
    passing_scores: int = 0
    backward: int
    """Short-lived gradients at the widest point of the backward pass, per token."""
    backward_scores: int = 0


def _matrices(a: Architecture) -> int:
    return 7 if a.gated_mlp else 6


def _adapter_outputs(a: Architecture, rank: int) -> int:
    """Elements per token of everything that adapters' matrices make (Hu et al. 2021): A x and B A x."""
    if not rank:
        return 0
    outputs = a.query_width + 2 * a.key_width + 2 * a.hidden_size
    return outputs + (2 if a.gated_mlp else 1) * a.intermediate_size + rank * _matrices(a)


@lru_cache(maxsize=1024)
def jax_block(a: Architecture, precision: str, checkpointing: str, kind: str, rank: int) -> Block:
    """A block of the JAX decoder under scan. Scores exist for one chunk of queries at a time, see
    `jax_moments.score_bytes`. XLA on a CPU computes 16-bit types in fp32 and stores them so."""
    h, q, k, f = a.hidden_size, a.query_width, a.key_width, a.intermediate_size
    c = 4 if precision == "fp32" or kind == "cpu" else 2
    norm = 4 * h + c * h  # its input, recomputed from; its output, the next matmuls' input
    attention = c * (2 * q + 2 * k)  # rotated queries and keys, values, output
    if a.query_key_norm:
        attention += (4 + c) * (q + k)
    mlp = c * f * (3 if a.gated_mlp else 2)  # gate, up, product; or up, activated up
    post = 2 * c * h if a.post_norms else 0
    everything = 2 * norm + attention + mlp + post
    everything += c * rank * _matrices(a)
    outputs = c * (2 * q + 2 * k + h + (2 if a.gated_mlp else 1) * f)
    outputs += (c * h if a.post_norms else 0) + c * _adapter_outputs(a, rank)
    kept = {"none": everything, "selective": 4 * h + outputs, "full": 4 * h}[checkpointing]
    return Block(
        element=c,
        everything=everything,
        kept=kept,
        # GPUs and TPUs read the kept outputs in place.
        recomputed=everything - (outputs if checkpointing == "selective" and kind != "cpu" else 0),
        passing=4 * h + 2 * c * h + c * f * (3 if a.gated_mlp else 2),
        backward=c * f * (2 if a.gated_mlp else 1) + 4 * h,
    )
