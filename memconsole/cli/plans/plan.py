"""`memconsole plan`: the memory table of a plan, each toggle's saving, and whether it fits."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from memconsole.announcing import slow_words
from memconsole.calibration import calibrated_here
from memconsole.cli.data.lengths import document as rows_document
from memconsole.cli.data.lengths import lines as rows_lines
from memconsole.cli.data.lengths import row_lengths
from memconsole.cli.exits import Exit
from memconsole.cli.machine.reading import read_devices
from memconsole.cli.options import build_plan, lengths_option, plan_options, timeout_option
from memconsole.cli.plans.cards import cards_document, table_document, table_lines
from memconsole.cli.plans.device import device_document, device_words
from memconsole.cli.plans.disk import disk_lines
from memconsole.cli.plans.sources import refusal, source_lines, weights_lines
from memconsole.cli.tables import columns, in_blocks
from memconsole.devices.budget import budget
from memconsole.memory.answers.cards import Needed, cards_table, needed
from memconsole.memory.estimate import estimate
from memconsole.memory.run_time import start_seconds, steps_are_known
from memconsole.memory.state.data import cache_bytes
from memconsole.memory.table import Estimate, MemoryTable, Saving, Tier
from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.data.left_out import left_out
from memconsole.plan.data.paths import absolute
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan
from memconsole.plan.plan_file import dumps
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


@click.command()
@plan_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--exact", is_flag=True, help="Wait for traced or compiled numbers.")
@timeout_option
@lengths_option
@click.option("--cards", "all_cards", is_flag=True, help="Show the memory of 1, 2, 4 … devices.")
@click.option("--toml", "as_toml", is_flag=True, help="Print the plan file instead.")
@click.option("--keys", is_flag=True, help="List every setting of a plan file.")
@click.option(
    "--catalog", "list_catalog", is_flag=True, help="List models, devices, data, presets."
)
@click.pass_context
def command(
    ctx: click.Context,
    preset: str | None,
    plan_file: Path | None,
    assignments: tuple[str, ...],
    source: str | None,
    as_json: bool,
    exact: bool,
    limit_seconds: float,
    lengths: bool,
    all_cards: bool,
    as_toml: bool,
    keys: bool,
    list_catalog: bool,
) -> None:
    """Price a plan: memory by component and phase, and what each toggle would save.

    The sign before a number says where it is from: ~ a formula, = a traced or compiled step, ✓ a formula
    corrected by finished runs of this machine. Ends with exit code 3 when the plan does not fit its
    device. Ends with 1 when --exact is given but exact numbers are not available:
    the numbers then come from the formula.
    """
    if as_json and (as_toml or keys or list_catalog):
        ctx.fail("--json is for prices; --toml, --keys and --catalog print none")
    if keys:
        click.echo(_keys())
        return
    if list_catalog:
        click.echo(_catalog())
        return
    plan = build_plan(preset, plan_file, assignments, source)
    if as_toml:
        click.echo(dumps(absolute(plan)), nl=False)
        return
    device = budget(plan, read_devices(plan))
    problem = ""
    if exact:
        priced, problem = _exact(plan, device, limit_seconds)
    else:
        priced = estimate(plan, device)
    priced = calibrated_here(plan, priced)
    needs = needed(plan, priced.table)
    table = cards_table(plan, device) if all_cards else ()
    rows = row_lengths(plan, device, measure=lengths)
    if as_json:
        words = document(plan, priced, problem) | {
            "rows": rows_document(plan, rows),
            "cards": cards_document(needs),
            **({"cards_table": table_document(table)} if all_cards else {}),
        }
        click.echo(json_module.dumps(words, indent=2))
    else:
        lines = [text(plan, priced, needs), "", *rows_lines(plan, rows)]
        lines += ["", *table_lines(table, device)] if all_cards else []
        click.echo("\n".join(lines))
    if problem:
        click.echo(f"memconsole: not exact: {problem}", err=True)
        ctx.exit(Exit.NOT_EXACT)
    ctx.exit(0 if priced.table.fits else Exit.DOES_NOT_FIT)


def _exact(plan: Plan, device: Budget, limit_seconds: float) -> tuple[Estimate, str]:
    """The estimate with traced or compiled numbers, and the reason if there are none."""
    from memconsole.cli.plans.exact import wait_for_exact
    from memconsole.memory.tracers.exact_book import ExactBook

    estimate(plan, device)  # Refuses a plan that cannot be priced before a tracer starts.
    book = ExactBook()
    try:
        problem = wait_for_exact(book, plan, device, limit_seconds)
        return estimate(plan, device, book.lookup), problem
    finally:
        book.close()


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
        "components": [
            {
                "name": c.name,
                "bytes": c.at(table.peak_phase),
                "tier": str(c.tier_at(table.peak_phase)),
                "phases": c.phases,
                "phase_tiers": {phase: str(c.tier_at(phase)) for phase in c.phases},
            }
            for c in table.components
        ],
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
        "toggles": [
            {
                "key": s.key,
                "value": s.value,
                "saves_bytes": s.saves_bytes,
                "tier": str(s.tier),
                "time_factor": round(s.time_factor, 4),
                "reason": s.reason,
                "available": s.available,
            }
            for s in priced.savings
        ],
        "step_seconds": priced.step_seconds,
        "tokens_per_second": priced.tokens_per_second,
        "unit": task_of(plan).unit,
        "mfu": priced.tokens_per_second / priced.peak_tokens_per_second
        if priced.peak_is_known
        else None,
        "epoch_minutes": priced.epoch_minutes,
        "run_steps": priced.run_steps,
        "run_steps_known": priced.run_steps is not None and steps_are_known(plan),
        "run_seconds": priced.run_seconds,
        "notes": [{"key": note.key, "words": note.words} for note in priced.notes],
    }


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
        *_about(table),
        f"host {table.host_tier}{format_bytes(table.host_bytes)}",
        *disk_lines(plan),
        table.words,
        *([needs.words] if needs else []),
        _step_line(plan, priced),
        *_run_lines(plan, priced),
        *filter(None, [slow_words(plan, budget)]),
        *(f"note: {note.words}" for note in priced.notes),
        "",
        *_changes(priced.savings),
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


def _changes(savings: Sequence[Saving]) -> list[str]:
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


def _about(table: MemoryTable) -> list[str]:
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


def _cell(count: int, tier: Tier) -> str:
    return f"{tier} {format_bytes(count):>8}" if count else "-"


def _keys() -> str:
    rows = [["key", "default", "expects", ""]]
    for setting in plans.SETTINGS.values():
        default = "none" if setting.default is None else str(setting.default)
        rows.append([setting.key, default, setting.expects, setting.help])
    return "\n".join(columns(rows, left=(0, 1, 2, 3)))


def _catalog() -> str:
    lines: list[str] = []
    for title, entries in (
        ("models", catalog.models()),
        ("devices", catalog.devices()),
        ("datasets", catalog.datasets()),
        ("presets", catalog.presets()),
    ):
        lines.append(title)
        rows = [["  " + name, getattr(entry, "label", "")] for name, entry in entries.items()]
        lines += columns(rows, left=(0, 1))
        lines.append("")
    return "\n".join(lines[:-1])
