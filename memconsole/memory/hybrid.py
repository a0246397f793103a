"""The memory table of a hybrid plan: one column for each phase of the run.

A step of a warmup, full or correct phase is an ordinary training step, so its column is the largest moment of that step. A
predict phase has no gradients, and only the activations of a forward pass (`memory/state/predicting.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from memconsole.memory.coefficients import Runtime, runtime
from memconsole.memory.host import (
    compiler_bytes,
    fewer_in_passes,
    heap_of_passes,
    runtime_bytes,
    trimmed_heap,
)
from memconsole.memory.state import predicting
from memconsole.memory.state.step_sizes import StepSizes, step_of
from memconsole.memory.table import (
    BETWEEN_STEPS,
    COMPONENTS,
    SNAPSHOTS,
    Component,
    MemoryTable,
    Tier,
)
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.sections.hybrid import GRADIENT_PHASES, RESTORE, HybridChoice, PhaseName
from memconsole.plan.sections.optimize import Precision

Price = Callable[[Plan], MemoryTable]
"""Makes the table of a plan without hybrid training."""


class _Priced(NamedTuple):
    """A plan without hybrid training, and its table."""

    plan: Plan
    table: MemoryTable

    def by_formula(self) -> _Priced:
        return self._replace(table=self.table.formula or self.table)


Steps = dict[Precision, _Priced]
"""The plans of the training steps of a hybrid plan, by their precision."""

PEAK_FACTORS = {"torch": 1.21, "jax": 1.21}
"""On a CPU, by backend: an upper bound of the peak of hybrid runs, as a share of the estimate. They exceed the estimate
because the heap keeps memory that earlier phases freed. Runs of `tests/accuracy/hybrid.py` must stay below it."""


class _Column(msgspec.Struct, frozen=True):
    """Live bytes of one phase."""

    parts: dict[str, int]
    tier: Tier = Tier.FORMULA
    tiers: dict[str, Tier] = {}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def with_snapshots(self, bytes_: int) -> _Column:
        return _Column(self.parts | {SNAPSHOTS: bytes_}, self.tier, self.tiers)


def plain(plan: Plan, phase: PhaseName | None = None) -> Plan:
    """`plan` without hybrid training, in the precision of `phase`."""
    changed: Plan = msgspec.structs.replace(plan, hybrid=HybridChoice())
    precision = plan.optimize.precision if phase is None else _precision(plan, phase)
    return _in_precision(changed, precision)


def _precision(plan: Plan, phase: PhaseName) -> Precision:
    precision = plan.hybrid.precision_of(phase)
    return plan.optimize.precision if precision == "same" else precision


def _in_precision(plan: Plan, precision: Precision) -> Plan:
    if precision == plan.optimize.precision:
        return plan
    optimize = msgspec.structs.replace(plan.optimize, precision=precision)
    changed: Plan = msgspec.structs.replace(plan, optimize=optimize)
    return changed


def jump_evaluation_plan(plan: Plan) -> Plan:
    """The plan without hybrid training whose evaluation takes the memory of a jump of `plan`. A jump computes the loss of
    half of the batch, micro-batch by micro-batch."""
    forward = plain(plan, "predict")
    rows = plan.train.batch_size
    if plan.optimize.accumulation_steps == 1:
        rows -= rows // 2
    train = msgspec.structs.replace(forward.train, evaluation_batch_size=rows)
    changed: Plan = msgspec.structs.replace(forward, train=train)
    return changed


def parts(plan: Plan) -> tuple[Plan, ...]:
    """The plans without hybrid training whose tables make the table of `plan`."""
    if not plan.hybrid.on:
        return (plan,)
    return tuple(dict.fromkeys((*_steps(plan).values(), jump_evaluation_plan(plan))))


def _steps(plan: Plan) -> dict[Precision, Plan]:
    """The plans without hybrid training in each precision of the training steps of `plan`, its own first."""
    without_hybrid = plain(plan)
    precisions = (_precision(plan, phase) for phase in GRADIENT_PHASES)
    others = {precision: _in_precision(without_hybrid, precision) for precision in precisions}
    return {without_hybrid.optimize.precision: without_hybrid} | others


def hybrid_table(
    plan: Plan, model: Model, price: Price, *, with_components: bool = True
) -> MemoryTable:
    """The table of a hybrid `plan`. Numbers of training steps keep their tier; those of predict phases are by
    formula."""
    steps = {precision: _Priced(one, price(one)) for precision, one in _steps(plan).items()}
    evaluated = jump_evaluation_plan(plan)
    jump = _Priced(evaluated, price(evaluated))
    table = _combine(plan, model, steps, jump, with_components)
    if table.formula is None:
        return table
    by_formula = {precision: one.by_formula() for precision, one in steps.items()}
    formula = _combine(plan, model, by_formula, jump.by_formula(), with_components)
    return msgspec.structs.replace(table, formula=formula)


def _combine(
    plan: Plan, model: Model, steps: Steps, jump: _Priced, with_components: bool
) -> MemoryTable:
    """The table of a hybrid plan from the tables of its `steps` and of its `jump`."""
    without_hybrid = steps[plan.optimize.precision]
    base = without_hybrid.table
    kind = base.budget.kind
    # Hybrid training changes no size of a training step.
    step = msgspec.structs.replace(step_of(without_hybrid.plan, model, kind), plan=plan)
    columns = _columns(step, steps, jump)
    totals = {phase: column.total for phase, column in columns.items()}
    peak_phase = max(totals, key=totals.__getitem__)
    peak = totals[peak_phase]
    reserved, context = peak, 0
    if kind != "cpu":
        reserved = base.reserved_bytes * peak // base.peak_bytes
        context = runtime(base.backend, kind, base.budget.catalog_name).context_bytes
    low, high = base.band_bytes
    added = reserved + context - base.device_bytes
    at_most, band_from = high + added, base.band_from
    most = int(PEAK_FACTORS.get(base.backend, PEAK_FACTORS["torch"]) * peak)
    if kind == "cpu" and most > at_most:
        at_most, band_from = most, "measured peaks of hybrid runs over their estimates"
    return msgspec.structs.replace(
        base,
        tier=columns[peak_phase].tier,
        components=_components(columns) if with_components else (),
        phases=totals,
        phase_tiers={phase: column.tier for phase, column in columns.items()},
        peak_phase=peak_phase,
        peak_bytes=peak,
        reserved_bytes=reserved,
        device_bytes=reserved + context,
        host=base.host.more(added if kind == "cpu" else predicting.host_bytes(step)),
        band_bytes=(low + added, at_most),
        band_from=band_from,
    )


def _columns(step: StepSizes, steps: Steps, jump: _Priced) -> dict[str, _Column]:
    """The phases in the order of a run, then what happens between steps."""
    plan, h, columns = step.plan, step.plan.hybrid, dict[str, _Column]()
    highest = {precision: _highest(one.table) for precision, one in steps.items()}
    trimmed = {
        precision: _with_kept_heap(step, steps[precision], c) for precision, c in highest.items()
    }

    def trained(phase: PhaseName) -> _Column:
        column = (highest if phase == "correct" else trimmed)[_precision(plan, phase)]
        return column.with_snapshots(predicting.kept_bytes(step, phase))

    if h.lengths.warmup_steps:
        columns["warmup"] = trained("warmup")
    columns["full"] = trained("full")
    columns["predict"] = _jump_column(step, jump, restoring=False)
    if h.memory != "none" and h.correction_interval > 1 and h.restore_ahead:
        columns[RESTORE] = _jump_column(step, jump, restoring=True)
    columns["correct"] = trained("correct")
    kept = predicting.kept_bytes(step, "correct")
    base = steps[plan.optimize.precision].table
    return columns | {phase: _column(base, phase).with_snapshots(kept) for phase in BETWEEN_STEPS}


def _highest(table: MemoryTable) -> _Column:
    """The largest phase of a plain training step."""
    return _column(table, max(table.step_phases, key=table.phases.__getitem__))


def _column(table: MemoryTable, phase: str) -> _Column:
    """A phase of a plain table."""
    parts = {c.name: c.phases.get(phase, 0) for c in table.components}
    tiers = {c.name: c.tiers[phase] for c in table.components if phase in c.tiers}
    return _Column(parts, table.phase_tier(phase), tiers)


def _with_kept_heap(hybrid: StepSizes, priced: _Priced, column: _Column) -> _Column:
    """A `column` of a plain table, with what the heap keeps in the run of `hybrid`."""
    if hybrid.kind != "cpu":
        return column
    table = priced.table
    step = step_of(priced.plan, hybrid.model, hybrid.kind)
    costs = runtime(table.backend, step.kind, table.budget.catalog_name)
    heap = _heap(step, costs, table)
    bytes_ = column.parts["runtime"] - heap + trimmed_heap(step, costs, heap)
    return msgspec.structs.replace(column, parts={**column.parts, "runtime": bytes_})


def _heap(step: StepSizes, costs: Runtime, table: MemoryTable) -> int:
    """Freed bytes that the heap of a CPU keeps in a step of a plain table."""
    if step.kind != "cpu":
        return 0
    framework = runtime_bytes(step, costs) + compiler_bytes(step.plan, costs)
    return _runtime(table) - framework


def _runtime(table: MemoryTable) -> int:
    """Bytes of the framework and of the heap in a step of a plain table."""
    return next(c.at("backward") for c in table.components if c.name == "runtime")


def _jump_column(step: StepSizes, priced: _Priced, *, restoring: bool) -> _Column:
    """The largest moment of a jump."""
    plan, table = priced
    forward = {c.name: c.at("evaluation") for c in table.components}
    costs = runtime(plan.backend, step.kind, table.budget.catalog_name)
    jump = step_of(plan, step.model, step.kind)
    # The heap returns its free memory to the system before each pass.
    heap = _heap(jump, costs, table)
    forward["runtime"] = _runtime(table) - heap
    forward["runtime"] += heap_of_passes(jump, costs, heap, _temporary_bytes(table, "evaluation"))
    forward["runtime"] -= fewer_in_passes(jump, plan.evaluation_batch)
    state = predicting.state_held(step, restoring=restoring)

    def live(moment: predicting.Moved) -> dict[str, int]:
        temporary = {"runtime": forward["runtime"], "workspace": moment.workspace}
        if moment.evaluates:
            temporary = forward
        lasting = {
            "weights": moment.weights,
            "optimizer state": state,
            SNAPSHOTS: moment.snapshots,
        }
        return temporary | lasting

    narrow = plan.optimize.precision != "fp32"
    moments = predicting.moments(step, narrow=narrow, restoring=restoring)
    largest = max(map(live, moments), key=lambda parts: sum(parts.values()))
    return _Column(dict.fromkeys(COMPONENTS, 0) | largest)


def _temporary_bytes(table: MemoryTable, phase: str) -> int:
    """Bytes that a phase of a plain table allocates and frees."""
    lasting = ("weights", "optimizer state", "runtime")
    return sum(c.at(phase) for c in table.components if c.name not in lasting)


def _components(columns: dict[str, _Column]) -> tuple[Component, ...]:
    names = dict.fromkeys(name for column in columns.values() for name in column.parts)
    return tuple(
        Component(
            name,
            {p: c.parts[name] for p, c in columns.items() if c.parts.get(name)},
            {p: c.tiers[name] for p, c in columns.items() if name in c.tiers},
        )
        for name in names
    )
