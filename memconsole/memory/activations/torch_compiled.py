"""The torch decoder's block as torch.compile runs it: the bytes it holds at its peak moments.

A whole block is one graph. Norms and elementwise operations are fused, so a tensor exists only if a matmul or
attention writes or reads it, or if the backward pass starts from it (the partitioner recomputes what is cheap:
PyTorch, torch/_functorch/partitioners.py). Dead buffers are reused (torch/_inductor/codegen/wrapper.py). Gradients of
weights are outputs of the graph, so all of them live until the block's backward pass ends. Widths are elements per
token: h hidden, f intermediate. c is the bytes of a compute element. `tests/training/memory/test_compiled_memory.py`
compares these bytes with the profiler's.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memconsole.memory.activations.block_programs import (
    Live,
    Program,
    Size,
    block_program,
    evaluated_block,
)
from memconsole.memory.activations.kernels import Kernels, updating_bytes
from memconsole.memory.state.sizes import sizes
from memconsole.plan.models.architecture import Architecture

FP32 = 4


@lru_cache(maxsize=2048)
def compiled_block(a: Architecture, kernels: Kernels) -> Program:
    """One decoder block. A block with capped attention counts as not compiled: its attention is one operator either way,
    and its peak is in that operator."""
    if a.attention_cap is not None:
        return block_program(a, kernels)
    uncompiled = block_program(a, kernels)
    kept = uncompiled.kept
    not_kept = _not_kept(a, kernels)
    if not_kept:
        kept = Live.of(_plus(kept.activations, -not_kept), copies=kept.copies)
    return Program(
        forward=(_forward(a, kernels, kept),),
        kept=kept,
        cast=0,
        backward=_backward(a, kernels, kept, adding=False),
        adding=_backward(a, kernels, kept, adding=True),
        gradients=uncompiled.gradients,
    )


@lru_cache(maxsize=2048)
def compiled_evaluation(a: Architecture, kernels: Kernels) -> tuple[Live, ...]:
    """The peak moment of a block that needs no gradient."""
    if a.attention_cap is not None:
        return evaluated_block(a, kernels)
    stream = Size(token=FP32 * a.hidden_size)
    return (Live.of(_plus(stream, _inner(a, kernels)), copies=_cast(a, kernels)),)


def _not_kept(a: Architecture, kernels: Kernels) -> int:
    """Bytes per token that an uncompiled block keeps and a compiled one does not. It recomputes the gate's activation, and
    the residual stream after attention. Instead of that stream, it keeps attention's output in the compute precision. The
    norms of a parallel block share their statistics."""
    h, c, mode = a.hidden_size, kernels.compute, kernels.checkpointing
    if mode != "none":
        return 0
    stream = FP32 * h if a.post_norms else (FP32 - c) * h
    if not a.pre_norms:  # no norm needs that stream, but a cast of it is made again
        stream = 0 if c == FP32 else -FP32 * h
    if a.parallel_residual:
        stream = 8
    return stream + (c * a.intermediate_size if a.gated_mlp else 0)


def _inner(a: Architecture, kernels: Kernels) -> int:
    """Bytes per token of attention's output, its norm, and the outputs of the MLP's first matmuls. An adapter's outputs
    are separate tensors."""
    products = (2 if a.gated_mlp else 1) * (2 if kernels.rank else 1)
    outputs = 2 if a.pre_norms else 1
    return kernels.compute * (outputs * a.hidden_size + products * a.intermediate_size)


def _cast(a: Architecture, kernels: Kernels) -> int:
    """Bytes of a 16-bit copy of one MLP matrix: each copy is made when it is needed."""
    if kernels.compute == FP32 or kernels.frozen:
        return 0
    return 2 * a.hidden_size * a.intermediate_size


def _forward(a: Architecture, kernels: Kernels, kept: Live) -> Live:
    """The peak moment of the forward pass, including the block's output."""
    h, f, c, mode = a.hidden_size, a.intermediate_size, kernels.compute, kernels.checkpointing
    if mode in ("full", "attention"):
        return Live.of(_plus(kept.activations, _inner(a, kernels)), copies=_cast(a, kernels))
    output = FP32 * h + (c * h if a.parallel_residual else 0)  # attention's output waits
    if mode == "selective":
        output += c * f * (2 if kernels.rank and a.gated_mlp else 1)
        if a.post_norms and a.pre_norms:
            output -= c * h  # the stream overwrites the branch's buffer
    elif (
        kernels.rank and a.post_norms
    ):  # the MLP's adapters, before its output is there; or the end
        output = max(c * (2 * f - h), output + c * h)
    else:
        output += c * h if c != FP32 or kernels.rank else 0
        widths = 2 if c == FP32 and not a.parallel_residual else 1
        output += c * f * widths if kernels.rank else 0
    return Live.of(_plus(kept.activations, output), copies=kept.copies)


def _backward(a: Architecture, kernels: Kernels, kept: Live, *, adding: bool) -> tuple[Live, ...]:
    """Two candidates for the peak of the backward pass: at the MLP's activation, and at the end, when every gradient is
    live. `adding`: gradients are added to those of earlier micro-batches."""
    last, all_gradients = _gradients(a, kernels)
    mode = kernels.checkpointing
    as_one = kernels  # uncompiled, the halves of a parallel block are checkpointed apart
    if mode == "attention" and a.parallel_residual:
        as_one = msgspec.structs.replace(kernels, checkpointing="full")
    uncompiled = block_program(a, as_one)
    if mode in (
        "full",
        "attention",
    ):  # 10 to 20 % too high for "attention", which recomputes only the attention half
        again = _recomputed(a, kernels)
        moments = uncompiled.adding if adding else uncompiled.backward
        inner = [
            Live.of(_plus(m.activations, again), m.workspace, m.gradients, m.copies)
            for m in moments
        ]
    else:
        # Without an attention kernel, scores take the same bytes as in an uncompiled block.
        inner = [m for m in uncompiled.backward if m.total.score]
        complete = last if mode == "none" or a.parallel_residual else 0
        at_activation = _at_activation(a, kernels)
        inner.append(_with_gradients(kept, at_activation, complete, adding=adding))
    update = 0
    if kernels.stepping:
        shape = (a.hidden_size, a.intermediate_size)
        update = updating_bytes(kernels, shape)
    streams = 2 * FP32 * a.hidden_size
    below = Live.of(Size(token=FP32 * a.hidden_size))
    end = _with_gradients(
        below, streams, all_gradients + update, adding=adding or bool(kernels.stepping)
    )
    return (*inner, end)


def _at_activation(a: Architecture, kernels: Kernels) -> int:
    """Bytes per token in addition to kept activations, in the backward pass of the MLP's activation: the gradients of
    the output and of the inner width, and with selective checkpointing also the recomputed tensors."""
    h, f, c = a.hidden_size, a.intermediate_size, kernels.compute
    narrow = c * h if c != FP32 or a.residual_multiplier != 1.0 else 0
    work = FP32 * h
    if kernels.checkpointing == "selective":
        widths = 4 if a.gated_mlp else 2
        if kernels.rank:
            return work + c * f * (widths + (3 if a.gated_mlp else 2))
        norms = 2 * c * h if a.parallel_residual else 0  # both are computed at once
        return work + c * f * widths + (0 if a.post_norms else narrow) + norms
    if a.post_norms:
        work -= c * h
    if a.biases:  # the bias's gradient reads the output's gradient again later
        work += narrow
    return work + c * f * (2 if kernels.rank and a.gated_mlp else 1)


def _recomputed(a: Architecture, kernels: Kernels) -> int:
    """Bytes per token that a fully checkpointed block needs in addition when it is compiled, because it then recomputes
    everything before its backward pass starts."""
    h, f, c = a.hidden_size, a.intermediate_size, kernels.compute
    if a.parallel_residual:  # the MLP's backward pass ends before attention is made again
        return c * (h - f if kernels.rank else -f)
    if kernels.rank:
        return c * ((3 if a.gated_mlp else 1) * f + h)
    narrow = c * h if c != FP32 else 0
    if a.post_norms:
        return -(c * f + narrow + (FP32 * h if narrow else 0))
    return -narrow if a.biases else 0


def _gradients(a: Architecture, kernels: Kernels) -> tuple[int, int]:
    """Bytes of the gradient of the MLP's last matrix, and of all gradients of a block."""
    block = sizes(a).block
    if kernels.frozen:
        return 0, FP32 * kernels.rank * block.adapter_width
    element = 2 if kernels.rounded and not kernels.summed else FP32
    return element * a.hidden_size * a.intermediate_size, element * block.elements


def _with_gradients(live: Live, work: int, gradients: int, *, adding: bool) -> Live:
    """`live` plus `work` bytes per token and `gradients` bytes. The gradients count as workspace if they are added to
    existing ones, else as gradients."""
    return Live.of(
        live.activations,
        Size(gradients if adding else 0, work),
        0 if adding else gradients,
        live.copies,
    )


def _plus(size: Size, token: int) -> Size:
    """`size` with `token` bytes per token added, but at least 0."""
    return size.plus_per_token(max(-size.token, token))
