"""What a mixture of experts holds in a JAX step: `backends/memconsole_jax/models/experts.py`, array by array."""

from __future__ import annotations

from memconsole.memory.state.sizes import STORAGE_BLOCK, coded_bytes
from memconsole.memory.state.step_sizes import StepSizes
from memconsole.plan.models.architecture import Architecture

FEWEST_ROWS, MOST_ROWS = 64, 512
"""The same in `memconsole_jax.models.experts`."""
CPU_MOST_ROWS = 256
"""`memconsole_jax.models.experts.CPU_MOST_ROWS`."""


def tile_rows(a: Architecture, tokens: int, kind: str) -> int:
    """Rows of a tile, for the `tokens` of a micro-batch on one device."""
    most = CPU_MOST_ROWS if kind == "cpu" else MOST_ROWS
    half = max(1, tokens * a.experts_per_token // a.experts // 2)
    return min(tokens, most, max(FEWEST_ROWS, 1 << (half - 1).bit_length()))


def gate_and_up(a: Architecture) -> int:
    """Elements per token of the outputs of gate and up."""
    return 2 * a.experts_per_token * a.intermediate_size


def kept_beside(a: Architecture, c: int) -> int:
    """Bytes per token that the backward pass reads beside these: the router's outputs, and of each pair its place and its
    expert. An element has `c` bytes."""
    return c * a.experts + 8 * a.experts_per_token


def filled_up(step: StepSizes, c: int) -> int:
    """Bytes of the rows that fill up the outputs of gate and up, so that the last tile is whole."""
    a = step.architecture
    if not a.experts:
        return 0
    return 2 * c * a.intermediate_size * tile_rows(a, step.tokens, step.kind)


def looping(step: StepSizes, c: int, *, training: bool) -> int:
    """Bytes that the loops over experts hold beside what tokens have: the experts of the layer, which are taken out of those
    of all layers, and their gradient; and of one expert its matrices in the type that computes, their gradient in fp32,
    and a tile."""
    a, s = step.architecture, step.sizes
    if not a.experts:
        return 0
    trained = training and not step.frozen_blocks
    one = s.block_experts // a.experts
    found = filled_up(step, c) + _stored(step) + c * one
    if trained:
        # A GPU and a TPU add the gradient of a layer to the sum over micro-batches as they make it.
        apart = step.kind == "cpu" or not step.accumulates
        found += 4 * one + apart * step.gradient * s.block_experts
    if step.shards > 1:
        # A device's share before it is gathered, and the gradient's sum over devices.
        found += _stored(step) // step.shards + trained * step.gradient * s.block_experts
    return found


def _stored(step: StepSizes) -> int:
    """Bytes of the experts of one layer, as they are stored."""
    s, o = step.sizes, step.plan.optimize
    if step.frozen_blocks and o.base_storage != "none":
        return coded_bytes(o.base_storage, -(-s.block_experts // STORAGE_BLOCK))
    narrow = step.rounded or (step.frozen_blocks and step.compute == 2 and step.kind != "cpu")
    return (2 if narrow else 4) * s.block_experts
