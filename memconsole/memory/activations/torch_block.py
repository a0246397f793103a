"""The torch decoder's block and final norm as programs on the tape: the bytes each holds at its peak moments.

Mirrors `memconsole_torch`: decoder.py, whose operations are in `torch_operations`, and checkpointing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec

from memconsole.memory.activations.torch_attention import AttentionOperations
from memconsole.memory.activations.torch_operations import FP32, Kernels, fp32
from memconsole.memory.activations.torch_tape import WORKSPACE, Live, Size, Slot, Tensor, widest
from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import OptimizeChoice


class Program(msgspec.Struct, frozen=True):
    """Live bytes of one block. Its input counts from the forward to the backward pass."""

    forward: tuple[Live, ...]
    """Peak moments of the forward pass. The last one includes the output."""
    kept: Live
    """Bytes kept between the forward and the backward pass."""
    cast: int
    """Additional bytes of weight copies, until the forward context ends."""
    backward: tuple[Live, ...]
    """Peak moments of the backward pass, including kept activations and the gradient of the output."""
    adding: tuple[Live, ...]
    """The same if gradients of weights are added to those of an earlier micro-batch."""
    gradients: int
    """Bytes of the weights' gradients that remain after the backward pass."""


@lru_cache(maxsize=2048)
def block_program(a: Architecture, kernels: Kernels) -> Program:
    """One decoder block."""
    return _run(AttentionOperations(a, kernels), _block)


@lru_cache(maxsize=2048)
def final_norm_program(a: Architecture, kernels: Kernels) -> Program:
    """The norm before the head, which is never checkpointed."""
    return _run(AttentionOperations(a, kernels), _norm)


@lru_cache(maxsize=2048)
def evaluated_block(a: Architecture, kernels: Kernels) -> tuple[Live, ...]:
    """Peak moments of a block that needs no gradient."""
    return _evaluated(AttentionOperations(a, kernels), _block)


@lru_cache(maxsize=2048)
def evaluated_norm(a: Architecture, kernels: Kernels) -> tuple[Live, ...]:
    return _evaluated(AttentionOperations(a, kernels), _norm)


def kept_per_token(
    a: Architecture, choice: OptimizeChoice, checkpointing: str, kind: str, frozen: bool
) -> Size:
    """Activations that one block keeps under `checkpointing`."""
    kernels = Kernels(
        compute=4 if choice.precision == "fp32" else 2,
        kind=kind,
        checkpointing=checkpointing,
        rank=choice.lora_rank,
        frozen=frozen,
        storage=choice.base_storage,
        rounded=choice.precision == "bf16-sr",
        summed=choice.precision == "bf16-sr" and choice.accumulation_steps > 1,
    )
    return block_program(a, kernels).kept.activations


Body = Callable[[AttentionOperations, Tensor], Tensor]


def _block(o: AttentionOperations, x: Tensor) -> Tensor:
    post = o.architecture.post_norms
    attended = _attention(o, o.norm(x))
    x = o.add(x, o.norm(attended) if post else attended)
    return o.add(x, o.norm(_mlp(o, o.norm(x))) if post else _mlp(o, o.norm(x)))


def _attention(o: AttentionOperations, x: Tensor) -> Tensor:
    a = o.architecture
    q = o.project(x, a.query_width)
    if a.query_key_norm:
        q = o.norm(q, a.heads)
    k = o.project(x, a.key_width)
    if a.query_key_norm:
        k = o.norm(k, a.kv_heads)
    v = o.project(x, a.key_width)
    if a.positions == "rope":
        q, k = o.rotate(q), o.rotate(k)
    attended = o.attend(q, k, v)
    return o.project(o.relay(attended), a.hidden_size)


def _mlp(o: AttentionOperations, x: Tensor) -> Tensor:
    f = o.architecture.intermediate_size
    if not o.architecture.gated_mlp:
        return o.project(o.activation(o.project(x, f)), o.architecture.hidden_size)
    return o.project(
        o.multiply(o.activation(o.project(x, f)), o.project(x, f)), o.architecture.hidden_size
    )


def _norm(o: AttentionOperations, x: Tensor) -> Tensor:
    return o.norm(x)


def _evaluated(o: AttentionOperations, body: Body) -> tuple[Live, ...]:
    h = o.architecture.hidden_size
    with o.tape.discarding():
        x = Tensor(o.tape.new(fp32(h)), h, FP32, None)
        body(o, x)
    return widest(o.tape.take_peaks())


def _run(o: AttentionOperations, body: Body) -> Program:
    a, tape, mode = o.architecture, o.tape, o.kernels.checkpointing
    h = a.hidden_size
    x = Tensor(tape.new(fp32(h)), h, FP32, None if o.kernels.first else Slot(fp32(h)))
    if mode == "none":
        y = body(o, x)
    else:
        o.outputs = [] if mode in ("selective", "attention") else None
        with tape.discarding():
            y = body(o, x)
    forward = widest(tape.take_peaks())
    slot, width = y.slot, y.element * y.width
    below, argument = x.slot, x if mode != "none" else None
    del x, y
    with_casts = tape.now()
    o.casts.clear()
    kept = tape.now()
    tape.take_peaks()
    gradient = tape.new(Size(token=width), WORKSPACE)
    if argument is not None:
        slot = _recompute(o, body, argument)
    tape.kind = WORKSPACE
    if slot is not None:
        slot.gradient = gradient
    del gradient
    tape.backward()
    if o.outputs is not None:
        o.outputs.clear()
    del argument, below
    backward = tape.take_peaks()
    return Program(
        forward=forward,
        kept=kept,
        cast=with_casts.copies - kept.copies,
        backward=widest(backward),
        adding=widest(backward, without_gradients=True),
        gradients=tape.now().gradients,
    )


def _recompute(o: AttentionOperations, body: Body, x: Tensor) -> Slot | None:
    """Rerun a checkpointed block's forward pass, up to the last tensor that is saved."""
    tape, h, c = o.tape, o.architecture.hidden_size, o.kernels.compute
    # The output's gradient has already been cast for the branch that enters the residual sum.
    waiting = tape.new(Size(token=c * h), WORKSPACE) if c != FP32 else None
    tape.most_saves, tape.saves, o.taking = tape.saves, 0, True
    y = body(o, x)
    tape.most_saves, o.taking = None, False
    o.casts.clear()
    del waiting
    return y.slot
