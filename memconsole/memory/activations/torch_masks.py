"""The tables that every block of a torch step reads: rotary cosines and sines, and attention masks."""

from __future__ import annotations

from memconsole.memory.activations.kernels import Mask, attends_in_parts
from memconsole.memory.state.step_sizes import StepSizes

MASK_ALIGNMENT = 16
"""Elements to which CUDA's memory-efficient attention pads a mask's rows (PyTorch, attention.cpp: pad_bias)."""


def mask_of(step: StepSizes) -> Mask:
    """The mask of layers that have one."""
    if not step.plan.data.isolate_documents:
        return "window"
    return "padded" if pads_mask(step) else "documents"


def tables_of(step: StepSizes, tokens: int) -> tuple[int, int]:
    """Bytes of the rotary cosines and sines (of global and local layers) and of the additive masks for `tokens`
    tokens: first during the forward pass, then the part that layers keep."""
    a, length = step.architecture, step.sequence
    local, wide = a.local_layers, a.layers - a.local_layers
    cut = a.windowed(length)
    rope = 4 * a.rotated_size * (2 if a.scales_queries(length, local=False) else 1)
    if step.plan.data.isolate_documents:
        mask = step.compute * tokens * length * (2 if cut and local and wide else 1)
        tables = rope * tokens * ((local > 0) + (wide > 0))
        looked_up = 0 if rope else 8 * tokens  # int64 indices of learned positions
        return tables + mask, tables + looked_up + (mask if keeps_mask(step) else 0)
    mask = step.compute * length * length if cut else 0
    padded = 0
    if mask and pads_mask(step) and not step.plan.train.attention_dropout:
        rows = -(-length // MASK_ALIGNMENT) * MASK_ALIGNMENT
        padded = step.compute * length * rows
        padded *= local if step.plan.optimize.gradient_checkpointing == "none" else 1
    used = rope * length * ((local > 0) + (wide > 0))
    kept = mask if local and (keeps_mask(step) or padded) else 0
    return 2 * rope * length + mask + padded, used + kept + padded


def pads_mask(step: StepSizes) -> bool:
    """Whether CUDA's kernel copies masks of this length into padded rows. Capped attention does not use the kernel."""
    unaligned = step.kind in ("gpu", "rocm") and step.sequence % MASK_ALIGNMENT > 0
    return unaligned and step.architecture.attention_cap is None


def keeps_mask(step: StepSizes) -> bool:
    """Whether layers keep the mask for the backward pass. A checkpointed layer does. Attention composed of matmuls, on
    MPS, does not read it again, and layers that keep a padded copy do not keep the mask itself."""
    if step.plan.optimize.gradient_checkpointing != "none":
        return True
    if attends_in_parts(step.plan, step.architecture):
        return True
    return step.kind != "apple" and not pads_mask(step)


def mask_making(step: StepSizes, tokens: int) -> int:
    """Temporary bytes of building a mask. A sliding window's mask needs two booleans and one extra element per entry.
    The masks of isolated documents need one boolean per entry of every row, and one per entry of the causal mask."""
    length = step.sequence
    if step.plan.data.isolate_documents:
        return (tokens + length) * length
    return (2 + step.compute) * length * length if step.architecture.windowed(length) else 0
