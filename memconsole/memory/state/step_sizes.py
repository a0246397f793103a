"""The sizes of a training step on one device, in bytes; the formulas of both backends read them."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memconsole.memory.state.gradient_flow import Flow, flow_of
from memconsole.memory.state.optimizer_state import Rule, State, state
from memconsole.memory.state.sizes import (
    Group,
    Sizes,
    adapted_block,
    coded_bytes,
    group,
    order,
    orthogonalizing,
    sizes,
)
from memconsole.plan.data.rows import row_bytes
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model, Parameter
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan
from memconsole.plan.sections.optimize import LoraTargets
from memconsole.plan.training.trained import frozen_names, has_adapter


class Moment(msgspec.Struct, frozen=True, gc=False):
    """Live bytes of each component at one moment of a step. The runtime's bytes are constant and not included."""

    phase: str
    weights: int = 0
    gradients: int = 0
    state: int = 0
    activations: int = 0
    logits: int = 0
    workspace: int = 0
    data: int = 0

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.gradients
            + self.state
            + self.activations
            + self.logits
            + self.workspace
            + self.data
        )


class StepSizes(msgspec.Struct, frozen=True, kw_only=True):
    """One plan's sizes."""

    plan: Plan
    model: Model
    kind: str
    sizes: Sizes
    tokens: int
    """Positions of a micro-batch: its rows times their length."""
    sequence: int
    evaluation_tokens: int
    """Positions of an evaluation batch."""
    compute: int
    """Bytes of an element in matmuls."""
    shards: int
    frozen: tuple[str, ...]
    """Names of the weights that are not trained (`plan/training/trained.py`)."""
    flow: Flow
    rounded: bool
    """Whether weights, except norms and biases, are stored in bf16 only, without an fp32 copy."""
    trained: Group
    state: State
    weights: int
    """All stored weights, including adapters."""
    gradients: int
    head: int
    """Elements of the matrix that makes logits. It has no gradient if it is frozen."""
    gathered: int
    """Unsharded weights present during forward and backward under FSDP."""
    data: int

    @property
    def architecture(self) -> Architecture:
        """The model of a language plan, or the decoder of a recommender."""
        model = self.model.decoder if isinstance(self.model, Recommender) else self.model
        assert isinstance(model, Architecture)
        return model

    @property
    def frozen_blocks(self) -> bool:
        """Whether every matrix of the blocks is frozen. They may have adapters."""
        return self.flow.inputs == 0

    @property
    def accumulates(self) -> bool:
        return self.plan.optimize.accumulation_steps > 1

    @property
    def gradient(self) -> int:
        """Bytes per element of a matrix's gradient: fp32 if gradients are accumulated, else the weight's type."""
        return 2 if self.rounded and not self.accumulates else 4

    @property
    def copied(self) -> bool:
        """Whether torch exchanges gradients between copies of the model (ddp). The gradients then stay in buffers."""
        o, count = self.plan.optimize, self.plan.device.count
        return self.plan.backend == "torch" and o.sharding == "ddp" and count > 1

    @property
    def standing(self) -> int:
        """Bytes of gradients that exist from the first micro-batch, or from the first step, on. With ddp, the sum over
        micro-batches is in addition to the buffers that are exchanged."""
        return self.gradients * (self.accumulates + self.copied)


@lru_cache(maxsize=8)
def step_of(plan: Plan, model: Model, kind: str) -> StepSizes:
    """The sizes of `plan` on a `kind` of device. They are cached, because the table of a hybrid plan reads those of one
    step several times."""
    o, s = plan.optimize, sizes(model)
    compute = 4 if o.precision == "fp32" else 2
    shards = plan.device.count if o.sharding == "fsdp" else 1
    frozen = frozen_names(plan, model)
    trained = _trained(model, o.lora_rank, o.lora_targets, frozen)
    adapters = adapter_group(plan, model)
    # XLA on a CPU would widen 16-bit weights in each step, so the JAX backend stores them in fp32 there.
    widens = plan.backend == "jax" and kind == "cpu"
    rounded = o.precision == "bf16-sr" and not widens
    narrow = s.total - s.small if rounded else 0
    if compute == 2 and not widens and not rounded:
        narrow = _narrow_elements(model, frozen)
    stored = 4 * (s.total + adapters.elements) - 2 * narrow
    if frozen and o.base_storage != "none":
        matrices = s.layers * s.block_matrices
        stored -= (2 if narrow else 4) * matrices
        stored += coded_bytes(o.base_storage, s.layers * s.block.coded_blocks)
    gradients = 4 * trained.elements
    if rounded and o.accumulation_steps == 1:
        gradients -= 2 * (trained.elements - trained.small)
    gathered = 0
    if shards > 1:
        gathered = compute * (2 * s.block.elements + s.outside.elements)
    rule = Rule(
        optimizer=o.optimizer,
        offload=o.optimizer_offload,
        rounded=rounded,
        backend=plan.backend,
        kind=kind,
        shards=shards,
    )
    kept = _state(rule, model, o.lora_rank, o.lora_targets, frozen)
    if plan.train.ema_decay:
        kept = kept.with_average(-(-4 * trained.elements // shards))
    return StepSizes(
        plan=plan,
        model=model,
        kind=kind,
        sizes=s,
        tokens=plan.micro_batch_tokens,
        sequence=plan.data.sequence_length,
        evaluation_tokens=plan.evaluation_batch * plan.data.sequence_length,
        compute=compute,
        shards=shards,
        frozen=frozen,
        flow=flow_of(model, frozen, o.lora_rank > 0),
        rounded=rounded,
        trained=trained,
        state=kept,
        weights=-(-stored // shards),
        gradients=-(-gradients // shards),
        head=s.head_matrix,
        gathered=gathered,
        data=_batch_bytes(plan, model, kind),
    )


@lru_cache(maxsize=4096)
def _state(
    rule: Rule, model: Model, rank: int, targets: LoraTargets, frozen: tuple[str, ...]
) -> State:
    """The optimizer's bytes. They are cached, because most key presses do not change them."""
    trained = _trained(model, rank, targets, frozen)
    return state(rule, trained, _order(model, rank, targets, frozen))


def trained_group(plan: Plan, model: Model) -> Group:
    """The weights that `plan` trains: those of the model that are not frozen, and adapters."""
    o = plan.optimize
    return _trained(model, o.lora_rank, o.lora_targets, frozen_names(plan, model))


def adapter_group(plan: Plan, model: Model) -> Group:
    """The adapters that `plan` adds."""
    return _adapters(model, plan.optimize.lora_rank, plan.optimize.lora_targets)


@lru_cache(maxsize=1024)
def _trained(model: Model, rank: int, targets: LoraTargets, frozen: tuple[str, ...]) -> Group:
    s = sizes(model)
    own = group(_others(model, frozen)) if frozen else s.used
    return own.plus(_adapters(model, rank, targets))


def _others(model: Model, frozen: tuple[str, ...]) -> list[Parameter]:
    """The weights that are not `frozen`."""
    apart = frozenset(frozen)
    return [p for p in model.parameters() if p.name not in apart]


@lru_cache(maxsize=256)
def _narrow_elements(model: Model, frozen: tuple[str, ...]) -> int:
    """Elements of the frozen weights that 16-bit plans store in 16 bits: all but norms and biases."""
    apart = frozenset(frozen)
    found = group(p for p in model.parameters() if p.name in apart)
    return found.elements - found.small


def _adapters(model: Model, rank: int, targets: LoraTargets) -> Group:
    """The adapters of the blocks' matrices (Hu et al. 2021): A (rank, in) and B (out, rank)."""
    if not rank:
        return Group()
    one, layers = adapted_block(model, targets), model.layers
    return Group(
        elements=rank * one.adapter_width * layers,
        tensors=2 * one.adapted * layers,
        largest=rank * one.adapter_largest,
        orthogonal=rank * one.adapter_width * layers,
        orthogonalizing=2 * rank * one.adapter_largest + rank**2,
        together=rank * one.adapter_largest,
        factored=(one.adapter_width + 2 * one.adapted * rank) * layers,
    )


def _order(
    model: Model, rank: int, targets: LoraTargets, frozen: tuple[str, ...]
) -> tuple[Group, ...]:
    """The trained weights one by one, without repeats of identical blocks."""
    s = sizes(model)
    if not frozen:
        return s.order
    targeted = [p for p in model.parameters() if has_adapter(p, targets)]
    adapters = (
        Group(
            elements=rank * side,
            tensors=1,
            largest=rank * side,
            orthogonal=rank * side,
            orthogonalizing=orthogonalizing((rank, side)),
            together=rank * side,
            factored=rank + side,
        )
        for one in (order(targeted) if rank else ())
        for side in one.sides
    )
    return (*adapters, *order(_others(model, frozen)))


def _batch_bytes(plan: Plan, model: Model, kind: str) -> int:
    """Bytes of a batch's arrays. On a CPU, or if one program runs the whole step, the rows of all micro-batches are live."""
    whole = kind == "cpu" or plan.backend == "jax"
    held = plan.optimize.accumulation_steps if whole else 1
    return row_bytes(plan, model) * plan.train.batch_size * held
