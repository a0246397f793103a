"""How long a whole run takes: its start, and its steps."""

from __future__ import annotations

from memconsole.memory.seconds import forward_share, seconds_per_unit, step_seconds
from memconsole.memory.state.data import training_units, units_per_step
from memconsole.memory.state.optimizer_state import state_bytes
from memconsole.memory.state.sizes import sizes
from memconsole.memory.state.step_sizes import trained_group
from memconsole.plan import catalog
from memconsole.plan.data.counted import counted_tokens
from memconsole.plan.data.rows import counted_rows
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan

START_SECONDS = {"torch": 4.0, "jax": 8.0}
"""From launch to the end of the first step of a small model, with empty compile caches: the upper end of what `python
tests/bench/starting.py` measured on two cores, 1.9 to 4.4 seconds (torch) and 7.0 to 10.2 (JAX)."""
BUILT = 1.2e8
"""Bytes of fp32 weights that are initialized per second, on the host. Two cores took 0.8 seconds (torch) and 1.5 (JAX)
longer for `gearhead` with 34 M parameters than for 1 M, and 3.8 and 5.1 for `gpt2` with 124 M: `python
tests/bench/starting.py --backend B --set model.name=M --set data.vocab_size=4096 --set data.sequence_length=64 --set
train.batch_size=1`, the stage `build`, the least of three."""
REHEARSED = 2e8
"""Bytes per second of the test checkpoint before the first step, which is written, hashed, read and loaded again. In the
same runs, the stage `preflight checkpoint` took 1.9 (torch) and 2.2 seconds (JAX) for 409 MB, and 9.5 and 7.4 for
1,493 MB. Another disk has another rate."""
COMPILER_SECONDS = 25.0
"""Seconds that torch.compile adds to the start: 40 seconds of processor time of the same run, more than half of it in one
process."""
UNROLLED_SECONDS = 2.6
"""Seconds that each block without a loop adds to the start in JAX: (50 - 19) / 12 for `gpt2` on the machine of an H100
(docs/optimizations.md). To measure it again: `python tests/bench/starting.py --backend jax --set model.name=gpt2 --set
optimize.compile=true`, the stage `build`."""


def run_steps(plan: Plan, model: Model) -> int | None:
    """Optimizer steps of the whole run; None if the size of its data is unknown."""
    if plan.train.max_steps:
        return plan.train.max_steps
    steps = epoch_steps(plan, model)
    return None if steps is None else plan.train.epochs * steps


def epoch_steps(plan: Plan, model: Model) -> int | None:
    """Optimizer steps of a pass over the training rows; None if the size of the data is unknown."""
    units = training_units(plan, model)
    return None if units is None else max(1, -(-units // units_per_step(plan, model)))


def steps_are_known(plan: Plan) -> bool:
    """Whether `run_steps` is exact: the plan sets the number, or an earlier run has counted its data. Otherwise it is
    guessed from the size of the data."""
    if plan.train.max_steps is not None:
        return True
    count = counted_tokens if isinstance(catalog.model(plan), Architecture) else counted_rows
    return not plan.data.mix and count(plan) is not None


def start_seconds(plan: Plan, model: Model, budget: Budget) -> float:
    """Estimated seconds before the second step: importing, reading data, building, rehearsing, compiling, and with DPO
    scoring the training pairs with the starting weights."""
    seconds = START_SECONDS.get(plan.backend, START_SECONDS["torch"])
    if plan.optimize.compile:
        unrolls = plan.backend == "jax"
        seconds += UNROLLED_SECONDS * model.layers if unrolls else COMPILER_SECONDS
    seconds += 4 * sizes(model).total / BUILT
    trained = trained_group(plan, model)
    checkpoint = 4 * trained.elements + state_bytes(plan.optimize.optimizer, trained)
    if plan.train.objective == "dpo" and isinstance(model, Architecture):
        steps = min(epoch_steps(plan, model) or 0, run_steps(plan, model) or 0)
        seconds += steps * step_seconds(plan, model, budget) * forward_share(plan, model)
    return seconds + (checkpoint / REHEARSED if plan.train.preflight else 0.0)


def run_seconds(plan: Plan, model: Model, budget: Budget) -> float | None:
    """Estimated seconds of the whole run; None if the size of its data is unknown."""
    steps = run_steps(plan, model)
    if steps is None:
        return None
    return start_seconds(plan, model, budget) + steps * step_seconds(plan, model, budget)


def seconds_per_unit_of_run(plan: Plan, model: Model, budget: Budget) -> float:
    """Estimated seconds of a step and its part of the run's start, divided by its tokens (or the task's units). If the
    length of the run is unknown, the start is not counted."""
    steps = run_steps(plan, model)
    each = seconds_per_unit(plan, model, budget)
    start = start_seconds(plan, model, budget)
    return each + (start / (steps * units_per_step(plan, model)) if steps else 0.0)
