"""The torch decoder's block as torch.compile runs it: what it holds at its widest moments.

One graph of a whole block: norms and elementwise operations run inside one another, so that a tensor exists only
where a product or attention makes or reads it, or where the backward pass starts from it (the partitioner that
makes again what is cheap: PyTorch, torch/_functorch/partitioners.py); a buffer nobody reads any more is written
again (torch/_inductor/codegen/wrapper.py). Gradients of weights are results of the graph, so that none goes before
the block's backward pass is over. Widths as in `torch_operations`. Held to what the profiler counts of compiled blocks by
tests/training/memory/test_compiled_memory.py.
"""

from __future__ import annotations

from functools import lru_cache

from memconsole.memory.activations.torch_block import Program, block_program
from memconsole.memory.activations.torch_operations import FP32, Kernels, updating_bytes
from memconsole.memory.activations.torch_tape import Live, Size
from memconsole.memory.state.sizes import sizes
from memconsole.plan.architecture import Architecture

_NOTHING = Size()


@lru_cache(maxsize=2048)
def compiled_block(a: Architecture, kernels: Kernels) -> Program:
    """One decoder block."""
    uncompiled, mode = block_program(a, kernels), kernels.checkpointing
    kept = uncompiled.kept
    if mode == "none":
        kept = _held(_more(kept.activations, -_made_again(a, kernels)), copies=kept.copies)
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
    """The widest moment of a block that no gradient will be asked of."""
    stream = Size(token=FP32 * a.hidden_size)
    return (_held(_more(stream, _inner(a, kernels)), copies=_cast(a, kernels)),)


def _made_again(a: Architecture, kernels: Kernels) -> int:
    """Bytes per token that a block keeps uncompiled: the gate's activation, and the stream behind attention, which
    is the block's input and what attention gave; the latter is kept in the compute precision."""
    h, c = a.hidden_size, kernels.compute
    stream = FP32 * h if a.post_norms else (FP32 - c) * h
    return stream + (c * a.intermediate_size if a.gated_mlp else 0)


def _inner(a: Architecture, kernels: Kernels) -> int:
    """What attention gave, its norm, and what the MLP's first products make, an adapter's apart, per token."""
    products = (2 if a.gated_mlp else 1) * (2 if kernels.rank else 1)
    return kernels.compute * (2 * a.hidden_size + products * a.intermediate_size)


def _cast(a: Architecture, kernels: Kernels) -> int:
    """A 16-bit copy of one of the MLP's matrices: each is made when it is read."""
    if kernels.compute == FP32 or kernels.frozen:
        return 0
    return 2 * a.hidden_size * a.intermediate_size


def _forward(a: Architecture, kernels: Kernels, kept: Live) -> Live:
    """The widest moment of the forward pass, the output in it."""
    h, f, c, mode = a.hidden_size, a.intermediate_size, kernels.compute, kernels.checkpointing
    if mode in ("full", "attention"):
        return _held(_more(kept.activations, _inner(a, kernels)), copies=_cast(a, kernels))
    output = FP32 * h
    if mode == "selective":
        output += c * f * (2 if kernels.rank and a.gated_mlp else 1)
        if a.post_norms:
            output -= c * h  # the stream is written where the branch was
    else:
        output += c * h if c != FP32 or kernels.rank else 0
        output += c * f * (2 if c == FP32 else 1) if kernels.rank else 0
    return _held(_more(kept.activations, output), copies=kept.copies)


def _backward(a: Architecture, kernels: Kernels, kept: Live, *, adding: bool) -> tuple[Live, ...]:
    """The MLP's activation, and the end, where every gradient is. `adding`: to those of earlier micro-batches."""
    down, whole = _gradients(a, kernels)
    mode = kernels.checkpointing
    uncompiled = block_program(a, kernels)
    if mode in (
        "full",
        "attention",
    ):  # of "attention" too much by a tenth to a fifth: its half is made again by itself
        again = _recomputed(a, kernels)
        moments = uncompiled.adding if adding else uncompiled.backward
        inner = [
            _held(_more(m.activations, again), m.workspace, m.gradients, m.copies) for m in moments
        ]
    else:
        # Where attention is composed, its scores are as they are uncompiled.
        inner = [m for m in uncompiled.backward if m.total.score]
        made = down if mode == "none" else 0
        inner.append(_ended(kept, _turning(a, kernels), made, adding=adding))
    update = 0
    if kernels.stepping:
        shape = (a.hidden_size, a.intermediate_size)
        update = updating_bytes(kernels, shape)
    streams = 2 * FP32 * a.hidden_size
    below = _held(Size(token=FP32 * a.hidden_size))
    end = _ended(below, streams, whole + update, adding=adding or bool(kernels.stepping))
    return (*inner, end)


def _turning(a: Architecture, kernels: Kernels) -> int:
    """Bytes per token beside what was kept, in the backward pass of the MLP's activation: the gradient of the output, that of
    the inner width, and with selective checkpointing all that was made again of it."""
    h, f, c = a.hidden_size, a.intermediate_size, kernels.compute
    narrow = c * h if c != FP32 else 0
    work = FP32 * h
    if kernels.checkpointing == "selective":
        widths = 4 if a.gated_mlp else 2
        if kernels.rank:
            return work + c * f * (widths + (3 if a.gated_mlp else 2))
        return work + c * f * widths + (0 if a.post_norms else narrow)
    if a.post_norms:
        work -= c * h
    if a.biases:  # a bias's gradient reads that of the output once more, later
        work += narrow
    return work + c * f * (2 if kernels.rank and a.gated_mlp else 1)


def _recomputed(a: Architecture, kernels: Kernels) -> int:
    """Bytes per token that a fully checkpointed block, which makes all again before it goes back, holds beyond
    what it does uncompiled."""
    h, f, c = a.hidden_size, a.intermediate_size, kernels.compute
    if kernels.rank:
        return c * ((3 if a.gated_mlp else 1) * f + h)
    narrow = c * h if c != FP32 else 0
    if a.post_norms:
        return -(c * f + narrow + (FP32 * h if narrow else 0))
    return -narrow if a.biases else 0


def _gradients(a: Architecture, kernels: Kernels) -> tuple[int, int]:
    """Bytes of the gradient of the MLP's last matrix, and of all of a block's."""
    block = sizes(a).block
    if kernels.frozen:
        return 0, FP32 * kernels.rank * block.adapter_width
    element = 2 if kernels.rounded and not kernels.summed else FP32
    return element * a.hidden_size * a.intermediate_size, element * block.elements


def _ended(live: Live, work: int, gradients: int, *, adding: bool) -> Live:
    """`live` with `work` bytes per token and so many bytes of gradients, which count apart where none are there yet."""
    return _held(
        live.activations,
        Size(gradients if adding else 0, work),
        0 if adding else gradients,
        live.copies,
    )


def _more(size: Size, token: int) -> Size:
    """`size` and so many bytes per token; not less than nothing."""
    return size._replace(token=max(0, size.token + token))


def _held(
    activations: Size, workspace: Size = _NOTHING, gradients: int = 0, copies: int = 0
) -> Live:
    total = Size(
        activations.constant + workspace.constant + gradients + copies,
        activations.token + workspace.token,
        activations.score + workspace.score,
    )
    return Live(activations, workspace, gradients, copies, total)
