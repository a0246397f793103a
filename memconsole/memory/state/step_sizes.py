"""The sizes of a training step on one device, in bytes; the formulas of both backends read them."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memconsole.memory.state.optimizer_state import Rule, State, state
from memconsole.memory.state.sizes import Group, Sizes, coded_bytes, group, order, sizes
from memconsole.plan.architecture import Architecture
from memconsole.plan.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of_model


class Moment(msgspec.Struct, frozen=True):
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
    frozen: bool
    rounded: bool
    """Whether weights, except norms and biases, are stored in bf16 only, without an fp32 copy."""
    trained: Group
    state: State
    weights: int
    """All stored weights, including adapters."""
    gradients: int
    head: int
    """Elements of the matrix that makes logits. It has no gradient if the base is frozen."""
    gathered: int
    """Unsharded weights present during forward and backward under FSDP."""
    data: int

    @property
    def architecture(self) -> Architecture:
        """The model of a language plan."""
        assert isinstance(self.model, Architecture)
        return self.model

    @property
    def accumulates(self) -> bool:
        return self.plan.optimize.accumulation_steps > 1

    @property
    def gradient(self) -> int:
        """Bytes per element of a matrix's gradient: fp32 if gradients are accumulated, else the weight's type."""
        return 2 if self.rounded and not self.accumulates else 4

    @property
    def standing(self) -> int:
        """Bytes of accumulated gradients, which are live in every micro-batch after the first."""
        return self.gradients if self.accumulates else 0


def step_of(plan: Plan, model: Model, kind: str) -> StepSizes:
    """The sizes of `plan` on a `kind` of device."""
    o, s = plan.optimize, sizes(model)
    compute = 4 if o.precision == "fp32" else 2
    shards = plan.device.count if o.sharding == "fsdp" else 1
    frozen = o.freeze_base or o.lora_rank > 0
    trained = trained_group(plan, model)
    # XLA on a CPU would widen a 16-bit base in each step, so the JAX backend stores it in fp32 there.
    narrow = frozen and not (plan.backend == "jax" and kind == "cpu")
    whole, coded = s.total, 0
    if frozen and o.base_storage != "bf16":
        whole -= s.layers * s.block_matrices
        coded = coded_bytes(o.base_storage, s.layers * s.block.coded_blocks)
    stored = whole * (compute if narrow else 4) + coded + (4 * trained.elements if frozen else 0)
    rounded = o.precision == "bf16-sr" and not (plan.backend == "jax" and kind == "cpu")
    if rounded:
        stored -= 2 * (s.total - s.small)
    gradients = 4 * trained.elements
    if rounded and o.accumulation_steps == 1:
        gradients -= 2 * (trained.elements - s.small)
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
    if isinstance(model, Architecture):
        kept = _state(rule, model, o.lora_rank, frozen)
    else:
        kept = _state_of_task(rule, model, _trained_names(plan, model))
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
def _state(rule: Rule, architecture: Architecture, rank: int, frozen: bool) -> State:
    """The optimizer's bytes. They are cached, because most key presses do not change them."""
    s = sizes(architecture)
    return state(rule, _trained(s, rank, frozen), _order(s, rank, frozen))


def trained_group(plan: Plan, model: Model) -> Group:
    """The weights that `plan` trains: a decoder's weights or its adapters; for other models the task decides."""
    o = plan.optimize
    if isinstance(model, Architecture):
        return _trained(sizes(model), o.lora_rank, o.freeze_base or o.lora_rank > 0)
    return _named_group(model, _trained_names(plan, model))


def _trained_names(plan: Plan, model: Model) -> tuple[str, ...]:
    return tuple(p.name for p in task_of_model(model).trained(plan, model))


@lru_cache(maxsize=256)
def _named_group(model: Model, names: tuple[str, ...]) -> Group:
    return group(p for p in model.parameters() if p.name in names)


@lru_cache(maxsize=4096)
def _state_of_task(rule: Rule, model: Model, names: tuple[str, ...]) -> State:
    """The optimizer's bytes for the weights called `names`."""
    one_by_one = order(p for p in model.parameters() if p.name in names)
    return state(rule, _named_group(model, names), one_by_one)


def _trained(s: Sizes, rank: int, frozen: bool) -> Group:
    return _adapters(s, rank) if frozen else s.used


def _adapters(s: Sizes, rank: int) -> Group:
    """The adapters of every block matrix (Hu et al. 2021): A (rank, in) and B (out, rank)."""
    if not rank:
        return Group()
    return Group(
        elements=rank * s.block.adapter_width * s.layers,
        tensors=2 * s.block.adapted * s.layers,
        largest=rank * s.block.adapter_largest,
        orthogonal=rank * s.block.adapter_width * s.layers,
        orthogonalizing=2 * rank * s.block.adapter_largest + rank**2,
        factored=(s.block.adapter_width + 2 * s.block.adapted * rank) * s.layers,
    )


def _order(s: Sizes, rank: int, frozen: bool) -> tuple[Group, ...]:
    """The trained weights one by one, without repeats of identical blocks."""
    if not frozen:
        return s.order
    return tuple(
        Group(
            elements=rank * side,
            tensors=1,
            largest=rank * side,
            orthogonal=rank * side,
            orthogonalizing=2 * rank * side + min(rank, side) ** 2,
            factored=rank + side,
        )
        for one in s.order
        for side in one.sides
    )


def _batch_bytes(plan: Plan, model: Model, kind: str) -> int:
    """Bytes of a batch's arrays. The rows of the whole step are live on a CPU, or if one program runs the whole step."""
    whole = kind == "cpu" or plan.backend == "jax"
    held = plan.optimize.accumulation_steps if whole else 1
    return row_bytes(plan, model) * plan.train.batch_size * held


def row_bytes(plan: Plan, model: Model) -> int:
    """Bytes of one row of a batch, all arrays together."""
    return sum(array.row_bytes for array in task_of_model(model).inputs(plan, model))
