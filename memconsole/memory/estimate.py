"""A plan's whole estimate: its table, its time, and what every toggle would change."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import msgspec

from memconsole.memory.coefficients import runtime
from memconsole.memory.exact.sharpen import KnownExact, alike, compiled, saved, sharpened
from memconsole.memory.exchange import devices_at_once
from memconsole.memory.formula import memory_table
from memconsole.memory.hybrid import Price, hybrid_table, plain
from memconsole.memory.reasons import nothing_saved
from memconsole.memory.run_time import epoch_steps, run_seconds, run_steps, steps_are_known
from memconsole.memory.seconds import peak_units_per_second, step_seconds
from memconsole.memory.state.data import units_per_step
from memconsole.memory.state.sizes import sizes
from memconsole.memory.state.step_sizes import adapter_group, trained_group
from memconsole.memory.table import Estimate, MemoryTable, Saving
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.data.added_tokens import added_notes
from memconsole.plan.data.items import item_notes
from memconsole.plan.data.tags import tag_notes
from memconsole.plan.data.unwritten import unwritten_notes
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import DataChoice, ModelChoice, Plan, PlanError, quote, uncompiled
from memconsole.plan.tasks import task_for
from memconsole.plan.toggles.optimization import Length, Optimization
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS, notes

Lookup = Callable[[Plan, Budget], KnownExact | None]
"""Returns the known exact numbers of a plan on a device without waiting; None if there are none."""


def estimate(plan: Plan, budget: Budget, lookup: Lookup | None = None) -> Estimate:
    """Price `plan` and every other value of every toggle on the device of `budget`. Raises `PlanError`."""
    model = model_of(plan)
    # Hybrid plans that differ in settings of hybrid training alone share the tables of their steps.
    price = cache(_prices(budget, lookup))
    table = table_of(plan, budget, lookup, price=price)
    seconds = step_seconds(plan, model, budget)
    s = sizes(model)
    adapters = adapter_group(plan, model).elements
    rate, steps = units_per_step(plan, model) / seconds, run_steps(plan, model)
    return Estimate(
        table=table,
        savings=tuple(
            _saving(plan, budget, table, seconds, row, value, lookup, price)
            for row in OPTIMIZATIONS
            for value in row.values(plan)
            if value != row.value(plan)
        ),
        parameters=s.total + adapters,
        trainable_parameters=trained_group(plan, model).elements,
        active_parameters=_active(model, adapters),
        step_seconds=seconds,
        tokens_per_second=rate,
        peak_tokens_per_second=devices_at_once(plan, budget)
        * peak_units_per_second(plan, model, budget),
        epoch_minutes=_epoch_minutes(plan, model, seconds),
        run_steps=steps,
        notes=(
            *notes(plan, budget.kind, Length(steps, steps is not None and steps_are_known(plan))),
            *item_notes(plan),
            *tag_notes(plan),
            *unwritten_notes(plan),
            *added_notes(plan, model),
        ),
        run_seconds=run_seconds(plan, model, budget),
    )


def _active(model: Model, adapters: int) -> int | None:
    """`Estimate.active_parameters`; None without experts."""
    if not isinstance(model, Architecture) or not model.experts:
        return None
    s = sizes(model)
    return s.total + adapters - round((1 - model.active_share) * s.block_experts * s.layers)


def model_of(plan: Plan) -> Model:
    """The catalog's model for a plan. It is cached, because a key press prices one model dozens of times."""
    d = plan.data
    return _model(catalog.with_sizes(plan).model, d.sequence_length, d.vocab_size, d.tokenizer)


@lru_cache(maxsize=512)
def _model(
    model: ModelChoice, sequence_length: int, vocab_size: int | None, tokenizer: str | None
) -> Model:
    data = DataChoice(sequence_length=sequence_length, vocab_size=vocab_size, tokenizer=tokenizer)
    return catalog.model(Plan(model=model, data=data))


def table_of(
    plan: Plan,
    budget: Budget,
    lookup: Lookup | None = None,
    *,
    parts: bool = True,
    price: Price | None = None,
) -> MemoryTable:
    """The memory table alone, with the exact numbers that `lookup` returns. Without `parts`, components are filled in
    only if there can be exact numbers. `price` gives the tables of a hybrid plan's steps. Raises `PlanError`."""
    if not plan.hybrid.on:
        return _plain_table(plan, budget, lookup, parts=parts)
    return hybrid_table(
        plan,
        model_of(plan),
        price or _prices(budget, lookup),
        with_components=parts or lookup is not None,
    )


def _prices(budget: Budget, lookup: Lookup | None) -> Price:
    return lambda plan: _plain_table(plan, budget, lookup)


def _plain_table(
    plan: Plan, budget: Budget, lookup: Lookup | None, *, parts: bool = True
) -> MemoryTable:
    model = model_of(plan)
    known = lookup(plan, budget) if lookup is not None else None
    if known is None:
        return memory_table(plan, model, budget, parts=parts)
    table = memory_table(plan, model, budget)
    if plan.backend != "torch" or not plan.optimize.compile:
        return sharpened(table, known)
    eager = memory_table(uncompiled(plan), model, budget)
    return compiled(table, sharpened(eager, known))


def training_floor(plan: Plan, budget: Budget) -> int:
    """Device bytes that `plan` needs with any optimizer, any place for its state and any heap: forward, loss and
    backward pass without that state or hybrid training, at the low end of the formula's band. Raises `PlanError`."""
    least = msgspec.structs.replace(
        plan.optimize, optimizer="sgd", optimizer_offload="none", heap="tight"
    )
    table = table_of(msgspec.structs.replace(plain(plan), optimize=least), budget)
    state = next(c for c in table.components if c.name == "optimizer state")
    # an optimizer in the backward pass adds its workspace to that phase
    left_out = {"optimizer step"} | ({"backward"} if least.optimizer_in_backward else set())
    phases = (phase for phase in table.step_phases if phase not in left_out)
    most = max(table.phases[phase] - state.at(phase) for phase in phases)
    costs = runtime(plan.backend, budget.kind, budget.catalog_name)
    if budget.kind == "cpu":
        return int(most * costs.band[0])
    reserved = costs.reserved_bytes(most, sixteen_bit=least.precision != "fp32")
    return costs.band_bytes(reserved * costs.band[0], 0)[0]


def _saving(
    plan: Plan,
    budget: Budget,
    table: MemoryTable,
    seconds: float,
    row: Optimization,
    value: Any,
    lookup: Lookup | None,
    price: Price,
) -> Saving:
    model = model_of(plan)
    absent = task_for(plan, model).not_applicable(plan).get(row.key)
    if absent is not None:
        return _unavailable(row, value, absent)
    refusal = row.refusal(plan, value, budget.kind)
    try:
        changed = row.apply(plan, value)
        after = table_of(changed, budget, lookup, parts=False, price=price)
        check(changed)
    except PlanError as error:
        # The screen shows the value beside the reason, so the reason need not repeat it.
        return _unavailable(row, value, str(error).removeprefix(f"{row.key} = {quote(value)}: "))
    saves, tier = saved(table, after)
    after_model = model_of(changed)
    changed_seconds = step_seconds(changed, after_model, budget)
    units = units_per_step(changed, after_model)
    factor = changed_seconds / units * units_per_step(plan, model) / seconds
    reason = refusal or (
        "" if saves > 0 else nothing_saved(row, plan, changed, *alike(table, after))
    )
    return Saving(
        key=row.key,
        value=value,
        saves_bytes=saves,
        time_factor=factor,
        reason=reason,
        available=refusal is None,
        tier=tier,
    )


def _unavailable(row: Optimization, value: Any, reason: str) -> Saving:
    return Saving(
        key=row.key, value=value, saves_bytes=0, time_factor=1.0, reason=reason, available=False
    )


def _epoch_minutes(plan: Plan, model: Model, seconds: float) -> float | None:
    """Minutes of a pass over the training rows, in steps of `seconds`; None if the dataset's size is unknown."""
    steps = epoch_steps(plan, model)
    return None if steps is None else steps * seconds / 60
