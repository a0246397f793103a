"""Bytes of the operands that Eigen packs for the products of a JAX program on a CPU, in addition to what XLA plans."""

from __future__ import annotations

from memconsole.memory.activations.jax_chunks import loss_chunk_tokens
from memconsole.memory.state.step_sizes import StepSizes
from memconsole.plan.models.architecture import Architecture

PACKED_DEPTH = 600
"""Eigen copies the operands of a product slice by slice, along the axis that the product sums over. Two slices of about 300
are in memory at a time (Eigen's `TensorContractionThreadPool.h`; measured as what products in XLA's programs allocate)."""
PACKED_PRODUCTS = 2
"""How many products XLA computes at the same time on a CPU."""


def library_bytes(step: StepSizes) -> int:
    """Bytes of the operands that Eigen packs in a step on a CPU, in addition to what XLA plans. Except in the fast heap,
    their memory is free again after each product. Those of the head come before most of the step's arrays are written, so
    that one product of a block is what the peak has."""
    if step.kind != "cpu":
        return 0
    a, t = step.architecture, step.tokens
    scored = loss_chunk_tokens(step, t) if step.plan.optimize.fused_loss else t
    h, f = a.hidden_size, _multiplied(a)
    if step.plan.optimize.heap != "fast":
        return _packed(t, h, f)
    return PACKED_PRODUCTS * max(_packed(t, h, f), _packed(scored, h, a.vocab_size))


def forward_library_bytes(step: StepSizes, rows: int) -> int:
    """The same for a forward pass of `rows` rows, which computes logits in chunks."""
    if step.kind != "cpu":
        return 0
    a, t = step.architecture, step.sequence * rows
    h, f = a.hidden_size, _multiplied(a)
    of_block = max(_packed_along(h, t, f), _packed_along(f, t, h))
    if step.plan.optimize.heap != "fast":
        return of_block
    return PACKED_PRODUCTS * max(
        of_block, _packed_along(h, loss_chunk_tokens(step, t), a.vocab_size)
    )


def _multiplied(a: Architecture) -> int:
    """Outputs of the widest product of all tokens in a block. An expert's products are of the tokens of one tile."""
    return a.query_width if a.experts else a.intermediate_size


def _packed(*sizes: int) -> int:
    """The most bytes that Eigen packs in one of the three products of a matrix: of the inputs, their gradients and the
    matrix's own. Each of the sizes is summed over in one of them."""
    total = sum(sizes)
    return max(_packed_along(size, total - size) for size in sizes)


def _packed_along(summed: int, *others: int) -> int:
    """Bytes that Eigen packs in a product that sums over an axis of `summed` elements. `others`: the sizes of the other
    axes of its operands."""
    return 4 * sum(others) * min(summed, PACKED_DEPTH)
