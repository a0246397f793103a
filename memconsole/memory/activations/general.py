"""A training step of any model as a sequence of moments: activations follow a general rule, the rest is exact.

Used for models without formulas or stored programs, until a trace or the compiler gives the exact bytes. The rule: the
backward pass of ``y = x @ W.T`` reads x for the gradient of W, and the next operation reads y, so each matrix
`(out, in)` of a block keeps `in + out` numbers per position, or `out` if it is frozen. Blocks below the lowest trained
weight keep nothing. The rule ignores attention scores and shared inputs; `LOW` and `HIGH` bound that error. For torch's
regressor the bytes of a block are known instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeGuard

import msgspec

from memconsole.memory.activations import recommender, torch_regressor
from memconsole.memory.activations.per_position import BlockBytes
from memconsole.memory.state.gradient_flow import Flow
from memconsole.memory.state.saving import gathered_to_save
from memconsole.memory.state.step_sizes import Moment, StepSizes
from memconsole.plan.data.rows import row_bytes
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.sections.optimize import Checkpointing
from memconsole.plan.tasks import task_for

LOW, HIGH = 0.5, 2.0
"""Factors that bound the error of the rule's bytes."""
WHERE_FROM = "the activations follow a general rule that may be off by a factor of two"
OFFLOADED_BLOCKS = {"cpu": 1, "apple": 1}
"""Number of blocks whose activations are on the device under activation offload: the one in use, and on devices that
copy and compute at the same time a second one (2 for kinds that are not listed)."""


class BlockSizes(msgspec.Struct, frozen=True):
    """Sizes of one block, in numbers per position."""

    width: int
    """The block's input."""
    outputs: int
    """Outputs of all its matrices."""
    widest: int
    """Input and output of its largest matrix."""
    outside: int
    """Inputs and outputs of the projections before the blocks."""
    head: int
    """Outputs of the model."""


@lru_cache(maxsize=256)
def block_of(model: Model) -> BlockSizes:
    """The sizes that the rule needs, from a model's weights."""
    weights = tuple(model.parameters())
    shapes = [p.shape for p in weights if p.layer == 0 and p.role == "matrix"]
    before = [p.shape for p in weights if p.role == "input"]
    return BlockSizes(
        width=shapes[0][-1] if shapes else 0,
        outputs=sum(shape[0] for shape in shapes),
        widest=max(map(sum, shapes), default=0),
        outside=sum(map(sum, before)),
        head=sum(p.shape[0] for p in weights if p.role == "head"),
    )


def kept_bytes(model: Model, flow: Flow, checkpointing: Checkpointing, compute: int) -> int:
    """Bytes per position that all blocks keep for the backward pass. A block's input stays in fp32."""
    block = block_of(model)
    if checkpointing == "none":
        return compute * (flow.blocks * block.outputs + flow.inputs)
    again = {"full": 0, "attention": block.width, "selective": block.outputs}[checkpointing]
    return flow.blocks * (4 * block.width + compute * again)


def per_position(step: StepSizes, compute: int) -> BlockBytes:
    """Bytes per position of a block: those of torch's regressor are known, others follow the rule."""
    checkpointing = step.plan.optimize.gradient_checkpointing
    if is_known(step.model, step.plan.backend):
        return torch_regressor.block_bytes(step.model, checkpointing, compute)
    block, flow = block_of(step.model), step.flow
    layers, passing = max(1, flow.blocks), compute * block.widest
    again = 0
    if checkpointing != "none":
        again = kept_bytes(step.model, flow, "none", compute) // layers
    return BlockBytes(
        kept=kept_bytes(step.model, flow, checkpointing, compute) // layers,
        again=again,
        forward=passing,
        backward=2 * passing,
        evaluation=2 * 4 * block.width + passing,
        outside=4 * block.outside if flow.below else 0,
    )


def is_known(model: Model, backend: str) -> TypeGuard[Regressor]:
    """Whether the bytes of a model's blocks are known, so that it needs no rule for them."""
    return backend == "torch" and isinstance(model, Regressor)


def loss_bytes(step: StepSizes, rows: int, *, training: bool = True) -> int:
    """Bytes of outputs, errors and their gradients: three times the outputs of the head, in fp32, for each of the task's
    units. A recommender has its own formulas."""
    if isinstance(step.model, Recommender):
        found = recommender.loss_bytes if training else recommender.evaluation_bytes
        return found(step.model, rows * step.sequence)
    units = rows * task_for(step.plan, step.model).units_per_row(step.plan)
    return 3 * 4 * units * block_of(step.model).head


def moments(step: StepSizes) -> Iterator[Moment]:
    """The largest moment of each phase of a step, of an evaluation and of a checkpoint."""
    o, flow = step.plan.optimize, step.flow
    weights, resident, data = step.weights + step.gathered, step.state.resident, step.data
    # XLA on a CPU computes 16-bit types in 32 bits.
    compute = 4 if step.plan.backend == "jax" and step.kind == "cpu" else step.compute
    copies = 0
    if compute == 2 and not step.rounded:
        copies = 2 * step.trained.orthogonal  # frozen matrices are stored so
    elif step.plan.backend == "jax" and step.kind == "tpu" and not _in_codes(step):
        # XLA rounds the operands of products in fp32 to 16 bits, those of all blocks before the first one.
        copies = 2 * step.sizes.layers * step.sizes.block_matrices
    layers = max(1, flow.blocks)
    held = min(layers, OFFLOADED_BLOCKS.get(step.kind, 2)) if o.activation_offload else layers
    block = per_position(step, compute)
    outside = block.outside * step.tokens
    before = 0
    if isinstance(step.model, Recommender):
        outside = recommender.projected_bytes(step.model)
        before = recommender.adapter_bytes(step.model)
    kept = block.kept * held * step.tokens + outside
    passing, again = block.backward * step.tokens, block.again * step.tokens
    loss = loss_bytes(step, step.plan.train.batch_size)
    standing = step.standing
    yield Moment(
        "forward", weights, standing, resident, kept, 0, copies + block.forward * step.tokens, data
    )
    if before:
        yield Moment("forward", weights, standing, resident, outside, 0, copies + before, data)
    yield Moment("loss", weights, standing, resident, kept, loss, copies, data)
    if block.again and step.plan.backend == "torch":
        copies //= layers  # each block casts its weights again
    yield Moment(
        "backward", weights, standing, resident, kept + again, loss, copies + passing, data
    )
    gradients, largest = step.gradients, step.gradient * step.trained.largest
    # The first block runs last. Its gradients do not exist yet, except with accumulation after the first micro-batch.
    made = gradients
    if o.optimizer_in_backward:
        gradients = made = largest
    elif not step.accumulates:
        made = max(0, gradients - step.gradient * flow.lowest)
    if before:  # the adapter runs again, after the backward pass of all blocks
        workspace = copies + 2 * before
        yield Moment("backward", weights, gradients, resident, outside, 0, workspace, data)
    last = block.kept * step.tokens + outside + again
    workspace = copies + passing + (largest if step.accumulates else 0)
    yield Moment("backward", weights, made, resident, last, 0, workspace, data)
    yield Moment(
        "optimizer step",
        step.weights,
        gradients,
        step.state.at_step,
        workspace=step.state.temporaries,
        data=data,
    )
    rows = step.plan.evaluation_batch
    yield Moment(
        "evaluation",
        weights,
        state=resident,
        activations=block.evaluation * step.evaluation_tokens,
        logits=loss_bytes(step, rows, training=False),
        workspace=copies,
        data=row_bytes(step.plan, step.model) * rows,
    )
    yield Moment("checkpoint", step.weights, state=resident, workspace=gathered_to_save(step))


def _in_codes(step: StepSizes) -> bool:
    """Whether the matrices of the blocks are frozen and stored in codes."""
    return step.frozen_blocks and step.plan.optimize.base_storage != "none"


def bounds(moments: Iterator[Moment] | tuple[Moment, ...], own: int) -> tuple[float, float]:
    """Low and high factor that bound the error of the peak. The uncertain bytes are those counted by the rule, and the
    `own` bytes of the framework, which were measured on decoders."""
    totals = []
    for m in moments:
        ruled = m.activations + m.logits + m.workspace + own
        sure = m.total - ruled + own
        totals.append((sure + LOW * ruled, sure + ruled, sure + HIGH * ruled))
    low, peak, high = (max(column) for column in zip(*totals, strict=True))
    return low / peak, high / peak
