"""What `memconsole plan` prints of an estimate, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from memconsole.announcing import host_words, slow_words
from memconsole.cli.plans.device import device_document, device_words
from memconsole.cli.plans.disk import disk_lines
from memconsole.cli.plans.sources import refusal, source_lines, weights_lines
from memconsole.cli.tables import columns, in_blocks
from memconsole.memory.answers.cards import Needed
from memconsole.memory.run_time import start_seconds, steps_are_known
from memconsole.memory.state.data import cache_bytes
from memconsole.memory.table import Estimate, MemoryTable, Saving, Tier
from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.data.left_out import left_out
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole.plan.training import recipe
from memconsole.plan.training.origin import origin
from memconsole.units import (
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_step,
)


def document(plan: Plan, priced: Estimate, exact_problem: str = "") -> dict[str, Any]:
    """The estimate as ``plan --json`` prints it. Every byte count is an integer."""
    table = priced.table
    budget = table.budget
    return {
        "backend": plan.backend,
        "device": device_document(budget),
        "weights": origin(plan).words,
        "refused": refusal(plan, budget.kind),
        "files": left_out(plan),
        "learning_rate": recipe.learning_rate(plan),
        "weight_decay": recipe.weight_decay(plan),
        "training": recipe.words(plan, total_steps=priced.run_steps),
        "parameters": priced.parameters,
        "trainable_parameters": priced.trainable_parameters,
        "active_parameters": priced.active_parameters,
        "tier": str(table.tier),
        "components": _component_rows(table),
        "phases": table.phases,
        "phase_tiers": {phase: str(table.phase_tier(phase)) for phase in table.phases},
        "peak_phase": table.peak_phase,
        "peak_bytes": table.peak_bytes,
        "reserved_bytes": table.reserved_bytes,
        "device_bytes": table.device_bytes,
        "host_bytes": table.host_bytes,
        "cache_bytes": cache_bytes(plan, catalog.model(plan)),
        "reserved_tier": str(table.reserved_tier),
        "device_tier": str(table.device_tier),
        "host_tier": str(table.host_tier),
        "band_bytes": list(table.band_bytes),
        "band_from": table.band_from,
        "correction_bytes": table.correction_bytes,
        "least_bytes": table.least_bytes,
        "source": table.source,
        "caveat": table.caveat,
        "exact_problem": exact_problem,
        "fits": table.fits,
        "verdict": str(table.verdict),
        "toggles": _toggle_rows(priced.savings),
        "step_seconds": priced.step_seconds,
        "tokens_per_second": priced.tokens_per_second,
        "unit": task_of(plan).unit,
        "mfu": _model_flops_utilization(priced),
        "epoch_minutes": priced.epoch_minutes,
        "run_steps": priced.run_steps,
        "run_steps_known": priced.run_steps is not None and steps_are_known(plan),
        "run_seconds": priced.run_seconds,
        "notes": [{"key": note.key, "words": note.words} for note in priced.notes],
    }


def _component_rows(table: MemoryTable) -> list[dict[str, Any]]:
    return [
        {
            "name": component.name,
            "bytes": component.at(table.peak_phase),
            "tier": str(component.tier_at(table.peak_phase)),
            "phases": component.phases,
            "phase_tiers": {phase: str(component.tier_at(phase)) for phase in component.phases},
        }
        for component in table.components
    ]


def _toggle_rows(savings: Sequence[Saving]) -> list[dict[str, Any]]:
    return [
        {
            "key": saving.key,
            "value": saving.value,
            "saves_bytes": saving.saves_bytes,
            "tier": str(saving.tier),
            "time_factor": round(saving.time_factor, 4),
            "reason": saving.reason,
            "available": saving.available,
        }
        for saving in savings
    ]


def _model_flops_utilization(priced: Estimate) -> float | None:
    """The rate, divided by the one at the device's peak; None if the peak is not known."""
    if not priced.peak_is_known:
        return None
    return priced.tokens_per_second / priced.peak_tokens_per_second


def _share_of_parameters(priced: Estimate) -> str:
    """How many of the parameters a token uses and how many are trained, where that is not all of them."""
    parts = []
    if priced.active_parameters is not None:
        parts.append(f"{format_count(priced.active_parameters)} a token")
    if priced.trainable_parameters != priced.parameters:
        parts.append(f"{format_count(priced.trainable_parameters)} trainable")
    return f" ({', '.join(parts)})" if parts else ""


def text(plan: Plan, priced: Estimate, needs: Needed | None = None) -> str:
    """The estimate as text."""
    table = priced.table
    budget = table.budget
    pairs = (
        f" ({plan.effective_batch // 2} pairs, {plan.objective_name})" if plan.learns_pairs else ""
    )
    lines = [
        f"{plan.model.name}  {format_count(priced.parameters)} parameters{_share_of_parameters(priced)}"
        + f"   {plan.backend} on {device_words(budget)}",
        *weights_lines(plan, budget.kind),
        f"{plan.train.batch_size} x {plan.data.sequence_length} {task_of(plan).positions} per micro-batch, "
        f"{plan.effective_batch} rows per step{pairs}",
        recipe.words(plan, total_steps=priced.run_steps),
        *source_lines(plan),
        "",
        *in_blocks(_phase_rows(table)),
    ]
    low, high = table.band_bytes
    lines += [
        "",
        f"peak {table.tier}{format_bytes(table.peak_bytes)} allocated in {table.peak_phase}, "
        f"{table.reserved_tier}{format_bytes(table.reserved_bytes)} reserved, "
        f"{table.device_tier}{format_bytes(table.device_bytes)} on the device"
        f"   (between {format_bytes(low)} and {format_bytes(high)})",
        *_notes_on_table(table),
        f"host {table.host_tier}{format_bytes(table.host_bytes)}",
        *(f"host memory: {words}" for words in filter(None, [host_words(plan, table)])),
        *disk_lines(plan),
        table.words,
        *([needs.words] if needs else []),
        _step_line(plan, priced),
        *_run_lines(plan, priced),
        *filter(None, [slow_words(plan, budget)]),
        *(f"note: {note.words}" for note in priced.notes),
        "",
        *_saving_rows(priced.savings),
    ]
    return "\n".join(lines)


def _phase_rows(table: MemoryTable) -> list[list[str]]:
    """The table of components by phase, with a row of names first and of totals last."""
    phases = list(table.phases)
    rows = [["", *phases]]
    for component in table.components:
        if any(component.phases.values()):
            cells = (_cell(component.at(p), component.tier_at(p)) for p in phases)
            rows.append([component.name, *cells])
    totals = (_cell(table.phases[p], table.phase_tier(p)) for p in phases)
    return [*rows, ["total", *totals]]


def _step_line(plan: Plan, priced: Estimate) -> str:
    """The time of a step, the rate, the minutes of an epoch if they are known, and where these come from."""
    words = f"step {priced.time_tier}{format_step(priced.step_seconds)}, {format_rate(priced.tokens_per_second)}"
    words += f" {task_of(plan).units}/s"
    if priced.epoch_minutes is not None:
        words += f", {priced.epoch_minutes:,.1f} minutes per epoch"
    return words + (f"   ({priced.time_from})" if priced.time_from else "")


def _saving_rows(savings: Sequence[Saving]) -> list[str]:
    """What each change of one setting would do, with names and values as --set takes them. Values that have the same
    effect share a line."""
    rows = [["what one change would do", "", "memory", "time"]]
    several = Counter(saving.key for saving in savings)
    for (key, *effects), group in groupby(savings, _effect):
        values = [plans.written(saving.value) for saving in group]
        words = ", ".join(values)
        if len(values) > 2:
            words = "any" if len(values) == several[key] else f"{values[0]} … {values[-1]}"
        rows.append([key, words, *effects])
    return columns(rows, left=(0, 1, 2, 4))


def _effect(saving: Saving) -> tuple[str, str, str, str]:
    """The setting, and in words what a change of it does to memory and time, and why."""
    effect = "no change"
    if saving.saves_bytes:
        verb = "saves " if saving.saves_bytes > 0 else "costs "
        effect = f"{verb}{saving.tier} {format_bytes(abs(saving.saves_bytes)):>8}"
    return saving.key, effect, f"{saving.time_factor:.2f}x", saving.reason


def _run_lines(plan: Plan, priced: Estimate) -> list[str]:
    """Steps and time of the whole run, if they are known."""
    if priced.run_steps is None or priced.run_seconds is None:
        return []
    start = format_duration(start_seconds(plan, catalog.model(plan), priced.table.budget))
    known = steps_are_known(plan)
    steps = f"{'' if known else Tier.FORMULA}{priced.run_steps:,} steps"
    guess = (
        ""
        if known
        else f" (guessed from the size of the data, until a run has counted its {task_of(plan).units})"
    )
    time = f"{Tier.FORMULA}{format_duration(priced.run_seconds)} in all, {start} of it to start"
    return [f"run {steps}{guess}, {time}"]


def _notes_on_table(table: MemoryTable) -> list[str]:
    """The source of the exact numbers, and how they may differ from the run."""
    lines = []
    if table.source:
        lines.append(
            f"  {Tier.EXACT} {table.source}" + (f": {table.caveat}" if table.caveat else "")
        )
    if table.band_from:
        lines.append(f"  band: {table.band_from}")
    if table.correction_bytes:
        lines.append("  the peak is corrected by measured runs; the table above is not")
    if table.least_bytes is not None:
        lines.append(f"  completes in an allocator of {format_bytes(table.least_bytes)}")
    if table.out_of_memory:
        lines.append("  the compiler refuses the program for this device: out of memory")
    return lines


def _cell(size: int, tier: Tier) -> str:
    return f"{tier} {format_bytes(size):>8}" if size else "-"
