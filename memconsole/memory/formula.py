"""From a plan to its memory table: every component's bytes at every moment of a training step.

A step is a sequence of moments; a component's live bytes are sums of products of sizes at each, and the peak
is the largest moment, never a sum of largest components. Each phase of the table is its largest moment.
"""

from __future__ import annotations

from memconsole.memory.activations import jax_step
from memconsole.memory.activations import torch_step as torch_step
from memconsole.memory.coefficients import runtime
from memconsole.memory.host import compiler_bytes, host_bytes, runtime_bytes, saved_bytes
from memconsole.memory.state.step_sizes import Moment, step_of
from memconsole.memory.table import COMPONENTS, PHASES, Component, MemoryTable, Tier
from memconsole.plan.architecture import Architecture
from memconsole.plan.budget import Budget
from memconsole.plan.plan import Plan


def memory_table(
    plan: Plan, architecture: Architecture, budget: Budget, *, parts: bool = True
) -> MemoryTable:
    """Price `plan` for `architecture` on the device of `budget`, from formulas alone. `parts`: by component, not in
    total alone."""
    costs = runtime(plan.backend, budget.kind)
    step = step_of(plan, architecture, budget.kind)
    timeline = jax_step if plan.backend == "jax" else torch_step
    largest: dict[str, Moment] = {}
    totals = dict.fromkeys(PHASES, -1)
    for moment in timeline.moments(step):
        total = moment.total
        if total > totals[moment.phase]:
            totals[moment.phase], largest[moment.phase] = total, moment
    on_cpu, compiler = budget.kind == "cpu", compiler_bytes(plan, costs)
    own = runtime_bytes(step, costs) + (compiler if on_cpu else 0)
    phases = {phase: total + own for phase, total in totals.items()}
    peak_phase = max(phases, key=phases.__getitem__)
    peak = phases[peak_phase]
    sixteen_bit = plan.optimize.precision != "fp32"
    reserved = peak if on_cpu else costs.reserved_bytes(peak, sixteen_bit=sixteen_bit)
    device = reserved if on_cpu else reserved + costs.context_bytes
    low, high = costs.band
    return MemoryTable(
        backend=plan.backend,
        budget=budget,
        tier=Tier.FORMULA,
        components=_components(largest, own) if parts else (),
        phases=phases,
        peak_phase=peak_phase,
        peak_bytes=peak,
        reserved_bytes=reserved,
        device_bytes=device,
        host_bytes=host_bytes(
            plan,
            architecture.vocab_size,
            costs,
            step.state.host,
            peak if on_cpu else saved_bytes(step) + compiler,
        ),
        band_bytes=costs.band_bytes(reserved * low, reserved * high),
    )


def _components(largest: dict[str, Moment], runtime_bytes: int) -> tuple[Component, ...]:
    rows: tuple[dict[str, int], ...] = tuple({} for _ in COMPONENTS)
    for phase, m in largest.items():
        live = (
            m.weights, m.gradients, m.state, m.activations, m.logits, m.workspace, m.data,
            runtime_bytes,
        )  # fmt: skip
        for row, size in zip(rows, live, strict=True):
            if size:
                row[phase] = size
    return tuple(Component(name, row) for name, row in zip(COMPONENTS, rows, strict=True))
