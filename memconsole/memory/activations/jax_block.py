"""What one block of the JAX decoder keeps for its backward pass, tensor by tensor, in bytes per token.

Follows the decoder operation by operation. Widths in comments are elements per token: h hidden, q heads × head_size,
k kv_heads × head_size, f intermediate. c is the bytes of a compute element.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memconsole.memory.activations.jax_experts import gate_and_up, kept_beside
from memconsole.memory.state.sizes import adapted_block
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.sections.optimize import LoraTargets


class BlockBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per token of one block."""

    element: int
    """Bytes of one element of the tensors between matmuls."""
    kept: int
    """Kept from the forward to the backward pass under the plan's checkpointing."""
    attention: int
    """What the attention half keeps without checkpointing."""
    mlp: int
    attention_again: int
    """What the backward pass recomputes of the attention half under the plan's checkpointing."""
    mlp_again: int
    adapters_again: int
    """What the backward pass of the MLP holds of adapters in addition, if it recomputes the MLP."""
    merged_again: int
    """The same, if XLA computes a matrix and the first matrix of its adapter as one product."""
    passing: int
    """Temporaries at the peak of a forward pass that keeps nothing."""
    tile: int = 0
    """With a tiled MLP: what the backward pass of one tile holds, per token of the tile. It is not part of the others."""
    tile_passing: int = 0
    """The same of the forward pass of one tile."""


def _adapter_inner(a: Architecture, rank: int, targets: LoraTargets) -> int:
    """Elements per token of the outputs A x of all adapters (Hu et al. 2021)."""
    return rank * adapted_block(a, targets).adapted if rank else 0


def _adapter_outputs(a: Architecture, rank: int, targets: LoraTargets) -> int:
    """Elements per token of all outputs of adapter matrices, A x and B A x."""
    if not rank:
        return 0
    outputs = _adapter_inner(a, rank, targets)
    if targets == "query-value":
        return outputs + a.query_width + a.key_width
    if targets != "mlp":
        outputs += a.query_width + 2 * a.key_width + _summed(a)
    if targets != "attention":
        outputs += (2 if a.gated_mlp else 1) * a.intermediate_size + a.hidden_size
    return outputs


def _summed(a: Architecture) -> int:
    """Elements per token of attention's output after its projection, if they are kept to make the stream between attention
    and MLP again. A parallel MLP does not read that stream."""
    return 0 if a.parallel_residual else a.hidden_size


def _adapter_inputs(a: Architecture, kind: str, rank: int, targets: LoraTargets) -> int:
    """Elements per token that a block keeps because adapters read them, less those that matrices without adapters do not
    keep. On a CPU, XLA keeps the output of a norm twice if adapters read it."""
    if not rank:
        return 0
    attention = _adapter_inputs_of_attention(a, kind, targets)
    if targets in ("all", "mlp"):
        return attention + _kept_twice(a, kind)
    return attention - a.hidden_size - (0 if a.experts else a.intermediate_size)


def _adapter_inputs_of_attention(a: Architecture, kind: str, targets: LoraTargets) -> int:
    """The same of attention alone."""
    return -a.hidden_size if targets == "mlp" else _kept_twice(a, kind)


def _kept_twice(a: Architecture, kind: str) -> int:
    """Elements per token of a norm's output that XLA keeps a second time."""
    return a.hidden_size if kind == "cpu" and a.pre_norms else 0


def _of_attention(targets: LoraTargets) -> LoraTargets:
    """The part of `targets` that is in attention, where some is."""
    return "attention" if targets == "all" else targets


def _adapters_again(a: Architecture, kind: str, rank: int, targets: LoraTargets) -> int:
    """Elements per token that XLA holds in the backward pass of a recomputed MLP because its matrices have adapters: what
    adapters add, beside the outputs of the matrices. On a CPU also their gradients and what adapters of the MLP's inputs
    add. (Found in XLA's plans of 60 steps of four models.)"""
    if not rank or targets not in ("all", "mlp"):
        return 0
    outputs = (2 if a.gated_mlp else 1) * a.intermediate_size
    if kind != "cpu":
        return outputs
    inputs = a.hidden_size if targets == "all" else -2 * a.hidden_size
    return 2 * outputs + inputs + _adapter_inner(a, rank, targets)


def _merged_again(a: Architecture, rank: int, targets: LoraTargets) -> int:
    """Elements per token of attention's matrices that are part of the same product as the first matrix of an adapter.
    They exist as long as the adapter's part is needed, that is until the backward pass of attention."""
    if not rank or targets == "mlp":
        return 0
    queries = a.query_width + a.key_width
    return queries if targets == "query-value" else queries + a.key_width + a.hidden_size


@lru_cache(maxsize=1024)
def jax_block(
    a: Architecture,
    precision: str,
    checkpointing: str,
    kind: str,
    rank: int,
    targets: LoraTargets = "all",
    *,
    tiled: bool = False,
) -> BlockBytes:
    """A block of the JAX decoder under scan. Attention scores exist for one chunk of queries at a time
    (`jax_chunks.score_bytes`). XLA on a CPU computes 16-bit types in fp32. It keeps bf16 in fp32 too, but not fp16. `tiled`:
    the MLP is computed in tiles."""
    h, q, k = a.hidden_size, a.query_width, a.key_width
    c = 4 if precision == "fp32" or kind == "cpu" else 2
    if a.experts and targets == "all":
        targets = "attention"  # experts have no adapters
    attention, mlp = _attention(a, c), _mlp(a, c)
    # On a GPU, what adapters of the MLP's inputs make is there beside what the matrices make.
    beside = _adapters_again(a, kind, rank, targets) if kind not in ("cpu", "tpu") else 0
    inside = _inner(a) + (0 if a.experts else a.intermediate_size)
    stored = 2 if precision == "fp16" else c
    held = c
    if stored < c:  # what matmuls read and make is there in both types
        attention += stored * (h + 2 * q + 2 * k)
        mlp += stored * (h + inside)
        held += stored
    gates = c * _inner(a)
    mlp -= held * inside if tiled else 0
    matmuls = c * (2 * q + 2 * k) + 4 * a.heads
    scaled = 4 * h if a.residual_multiplier != 1.0 else 0  # the gradient of what the MLP adds
    again = {
        "none": (0, 0),
        "selective": (attention - matmuls + c * (q + k), mlp - gates - c * a.experts),
        "attention": (attention - c * q - 4 * a.heads, mlp + scaled),
        "full": (attention, mlp + scaled),
    }[checkpointing]
    recomputed = checkpointing in ("attention", "full") and kind != "tpu"
    adapters = _adapters_again(a, kind, rank, targets) if recomputed or tiled else 0
    adapters *= 4 if precision == "fp32" else 2
    merged = _merged_again(a, rank, targets) if recomputed and kind != "cpu" else 0
    passing = gates + (
        4 * h + kept_beside(a, c) if a.experts else c * (a.intermediate_size + beside)
    )
    return BlockBytes(
        element=c,
        kept=_kept(a, stored, checkpointing, kind, rank, targets, tiled),
        attention=attention,
        mlp=mlp,
        attention_again=again[0],
        mlp_again=again[1],
        adapters_again=0 if tiled else adapters,
        merged_again=c * merged,
        passing=4 * h + 2 * c * h + (0 if tiled else passing),
        tile=held * inside + adapters if tiled else 0,
        tile_passing=passing if tiled else 0,
    )


def _attention(a: Architecture, c: int) -> int:
    """Bytes per token that the attention half keeps without checkpointing, if an element has `c` bytes."""
    q, k = a.query_width, a.key_width
    # Rotated queries and keys, values, output, and the logarithms of the sums over scores.
    matmuls = c * (2 * q + 2 * k) + 4 * a.heads
    return _norm(a, c) + matmuls + ((4 + c) * (q + k) if a.query_key_norm else 0)


def _mlp(a: Architecture, c: int) -> int:
    """The same for the MLP: gate, up and their product, or up and what the activation makes of it."""
    shared = 4 * a.hidden_size if a.parallel_residual else 0  # both norms read the same input
    beside = kept_beside(a, c) if a.experts else c * a.intermediate_size
    return _norm(a, c) - shared + c * _inner(a) + beside


def _inner(a: Architecture) -> int:
    """Elements per token that gate and up make, or up alone."""
    if a.experts:
        return gate_and_up(a)
    return (2 if a.gated_mlp else 1) * a.intermediate_size


def _norm(a: Architecture, c: int) -> int:
    """A norm's input, to recompute from; and its output, which the next matmuls read."""
    return (4 * a.hidden_size if a.pre_norms else 0) + c * a.hidden_size


def _kept(
    a: Architecture,
    c: int,
    checkpointing: str,
    kind: str,
    rank: int,
    targets: LoraTargets,
    tiled: bool,
) -> int:
    """Bytes per token that a block keeps from the forward to the backward pass. A tiled MLP keeps its input alone."""
    h, q, k = a.hidden_size, a.query_width, a.key_width
    output = c * q + 4 * a.heads  # of attention, and the logarithms of its sums over scores
    if checkpointing == "full":
        return 4 * h
    if checkpointing == "attention":
        return 4 * h + output
    if checkpointing == "selective":
        outputs = output + c * (q + 2 * k + _summed(a) + _inner(a) + a.experts)
        outputs += c * h if a.post_norms else 0
        return 4 * h + outputs + c * _adapter_outputs(a, rank, targets)
    everything = _attention(a, c) + _mlp(a, c) + (2 * c * h if a.post_norms else 0)
    inner, inputs = _adapter_inner(a, rank, targets), _adapter_inputs(a, kind, rank, targets)
    product = 0 if a.experts else a.intermediate_size
    if tiled:
        everything -= c * (_inner(a) + product)
        inner = 0 if targets == "mlp" else _adapter_inner(a, rank, _of_attention(targets))
        inputs = _adapter_inputs_of_attention(a, kind, targets) if rank else 0
        product = 0
    everything += c * (inner + inputs)
    if kind == "tpu" and c == 4:
        # Norms' outputs and the product: only matmuls read them, in 16 bits.
        everything -= 2 * (2 * h + product)
    return everything
