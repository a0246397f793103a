"""From a plan to its memory table: every component's bytes at every moment of a training step.

A step is a sequence of moments. The peak is the largest moment, never a sum of each component's largest value. Each
phase of the table shows the largest moment of that phase.
"""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory.activations import general, jax_step, torch_step
from memconsole.memory.activations.block_programs import is_traced
from memconsole.memory.coefficients import runtime
from memconsole.memory.host import (
    compiler_bytes,
    evaluation_heap,
    heap_bytes,
    heap_spread,
    host_of,
    returns_pages,
    runtime_bytes,
    saved_bytes,
    settled_bytes,
)
from memconsole.memory.state.step_sizes import Moment, StepSizes, step_of
from memconsole.memory.table import (
    BETWEEN_STEPS,
    COMPONENTS,
    EVALUATION,
    Component,
    MemoryTable,
    Tier,
)
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan
from memconsole.plan.processes import devices_of_each

PHASES = ("forward", "loss", "backward", "optimizer step", "evaluation", "checkpoint")
"""The phases of a plain training step and those between steps, in the order of a table."""


def memory_table(plan: Plan, model: Model, budget: Budget, *, parts: bool = True) -> MemoryTable:
    """Price `plan` for `model` on the device of `budget`, from formulas alone. Without `parts` only totals are filled
    in, no components."""
    costs = runtime(plan.backend, budget.kind, budget.catalog_name)
    step = step_of(plan, model, budget.kind)
    largest: dict[str, Moment] = {}
    totals: dict[str, int] = {}
    for moment in moments(step):
        total = moment.total
        if moment.phase not in totals or total > totals[moment.phase]:
            totals[moment.phase], largest[moment.phase] = total, moment
    on_cpu, compiler = budget.kind == "cpu", compiler_bytes(plan, costs)
    framework = runtime_bytes(step, costs)
    in_step = [moment for phase, moment in largest.items() if phase not in BETWEEN_STEPS]
    heap = heap_bytes(step, costs, in_step)
    standing = compiler if on_cpu else 0
    own = framework + heap + standing
    owned = dict.fromkeys(largest, own)
    step_peak = framework + heap + max(moment.total for moment in in_step)
    for phase in BETWEEN_STEPS if returns_pages(step, costs) else ():
        settled = settled_bytes(step, costs, largest[phase], heap, step_peak)
        owned[phase] = standing + settled
    ordered = {phase: totals[phase] for phase in PHASES if phase in totals} | totals
    phases = {phase: total + owned[phase] for phase, total in ordered.items()}
    peak_phase = max(phases, key=phases.__getitem__)
    peak = phases[peak_phase]
    sixteen_bit = plan.optimize.precision != "fp32"
    reserved = peak if on_cpu else costs.reserved_bytes(peak, sixteen_bit=sixteen_bit)
    device = reserved if on_cpu else reserved + costs.context_bytes
    (low, high), why = costs.band, ""
    if _in_general(plan, model):
        least, most = general.bounds(tuple(largest.values()), own)
        low, high, why = low * least, high * most, general.WHERE_FROM
    kept = heap
    if peak_phase == EVALUATION and isinstance(model, Architecture):
        kept = max(heap, evaluation_heap(step, costs, largest[peak_phase], heap))
    less, more = heap_spread(step, costs, kept)
    lowest, highest = reserved * low - less, reserved * high + more
    highest = max(highest, torch_step.logits_after_forward(step, largest) + own)
    together = devices_of_each(plan)
    return MemoryTable(
        backend=plan.backend,
        budget=budget,
        tier=Tier.FORMULA,
        components=_components(largest, owned) if parts else (),
        phases=phases,
        peak_phase=peak_phase,
        peak_bytes=peak,
        reserved_bytes=reserved,
        device_bytes=device,
        host=host_of(step, costs, together * peak if on_cpu else saved_bytes(step) + compiler),
        devices_in_process=together,
        band_bytes=costs.band_bytes(lowest, highest),
        band_from=why,
    )


def moments(step: StepSizes) -> Iterator[Moment]:
    """The moments of a step: decoders have their own for each backend, and so has a recommender in torch. Other models
    use the general rule."""
    if step.plan.backend == "torch" and isinstance(step.model, Architecture | Recommender):
        return torch_step.moments(step)
    if isinstance(step.model, Architecture):
        return jax_step.moments(step)
    return general.moments(step)


def _in_general(plan: Plan, model: Model) -> bool:
    """Whether activations follow the general rule: if a model has no moments of its own, or if its torch blocks have no
    stored programs."""
    if plan.backend == "torch" and isinstance(model, Recommender):
        return not is_traced(model.decoder)
    if not isinstance(model, Architecture):
        return not general.is_known(model, plan.backend)
    return plan.backend == "torch" and not is_traced(model)


def _components(largest: dict[str, Moment], owned: dict[str, int]) -> tuple[Component, ...]:
    rows: tuple[dict[str, int], ...] = tuple({} for _ in COMPONENTS)
    for phase, m in largest.items():
        live = (
            m.weights, m.gradients, m.state, m.activations, m.logits, m.workspace, m.data,
            owned[phase],
        )  # fmt: skip
        for row, size in zip(rows, live, strict=True):
            if size:
                row[phase] = size
    return tuple(Component(name, row) for name, row in zip(COMPONENTS, rows, strict=True))
