"""`memconsole fit`: the fastest settings of a plan that fit a budget, and the largest and smallest that work."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Any

import click
import msgspec

from memconsole.cli.lengths import document as rows_document
from memconsole.cli.lengths import lines as rows_lines
from memconsole.cli.lengths import row_lengths
from memconsole.cli.options import build_plan, plan_options
from memconsole.cli.plan import DOES_NOT_FIT
from memconsole.cli.tables import columns
from memconsole.devices.budget import budget
from memconsole.devices.planned import catalog_budgets, missing_compiler
from memconsole.devices.probe import read_once
from memconsole.memory.advice import largest_micro_batch, largest_sequence_length
from memconsole.memory.reasons import PHASE_WORDS
from memconsole.memory.solve import Fit, fit, smallest_device, smallest_device_fitted
from memconsole.memory.table import Budget, MemoryTable
from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.optimizations import OPTIMIZATIONS
from memconsole.plan.plan import Plan, PlanError, quote
from memconsole.units import MIB, format_bytes, parse_bytes

LEAST_BUDGET = MIB
"""A budget below is a forgotten unit."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the command found out."""

    given: Plan
    found: Fit
    keep: frozenset[str]
    notes: tuple[str, ...]
    largest_micro_batch: tuple[int | None, int | None]
    """Of the plan as given, and as fitted."""
    largest_sequence_length: tuple[int | None, int | None]
    smallest_device: str | None
    """Of the catalog, for the plan as given."""
    smallest_device_fitted: str | None
    """The same, fitted to each device."""


@click.command()
@plan_options
@click.option("--budget", "amount", metavar="SIZE", help="Usable memory instead, as in 12GiB.")
@click.option("--keep", multiple=True, metavar="KEY", help="Leave this setting as it is.")
@click.option("--lengths", is_flag=True, help="Measure how many tokens documents hold.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--toml", "as_toml", is_flag=True, help="Print the fitted plan file instead.")
@click.pass_context
def command(
    ctx: click.Context,
    preset: str | None,
    plan_file: Path | None,
    assignments: tuple[str, ...],
    amount: str | None,
    keep: tuple[str, ...],
    lengths: bool,
    as_json: bool,
    as_toml: bool,
) -> None:
    """Find the settings that fit the device at the least estimated time.

    Changes that leave the training result alone come first. Rows per step and tokens per row stay. Ends with
    exit code 3 when no settings fit.
    """
    plan = build_plan(preset, plan_file, assignments)
    pinned = frozenset(kept_key(word) for word in keep)
    device = budget(plan, read_once())
    if amount is not None:
        device = limited(device, amount)
    if as_toml:
        pinned, _ = with_machine(plan, device, pinned)
        found = fit(plan, device, pinned)
        if found.fits:
            click.echo(plans.dumps(found.plan), nl=False)
        else:
            click.echo(f"memconsole: {hopeless(found)}", err=True)
    else:
        answer = solve(plan, device, pinned)
        found = answer.found
        rows = row_lengths(found.plan, device, measure=lengths)
        if as_json:
            words = document(answer) | {"rows": rows_document(found.plan, rows)}
            click.echo(json_module.dumps(words, indent=2))
        else:
            click.echo("\n".join([*text(answer), "", *rows_lines(found.plan, rows)]))
    ctx.exit(0 if found.fits else DOES_NOT_FIT)


def kept_key(word: str) -> str:
    """The setting that `word` names: a key, or its last part where that is unambiguous. Raises `PlanError`."""
    if word in plans.SETTINGS:
        return word
    tails = [key for key in plans.SETTINGS if key.rpartition(".")[2] == word]
    if len(tails) == 1:
        return tails[0]
    known = [row.key for row in OPTIMIZATIONS]
    hint = plans.nearest(word, plans.SETTINGS) or plans.nearest(word, known)
    raise PlanError(f"--keep {quote(word)}: unknown key{hint or '; known: ' + ', '.join(known)}")


def limited(device: Budget, amount: str) -> Budget:
    """`device` with the usable bytes a person asked for. Raises `PlanError`."""
    try:
        usable = parse_bytes(amount)
    except ValueError:
        usable = -1
    if usable < LEAST_BUDGET:
        raise PlanError(
            f"--budget {quote(amount)}: expected an amount with its unit, such as 12GiB, 12GB or 800MiB"
        )
    return msgspec.structs.replace(
        device,
        usable_bytes=usable,
        total_bytes=max(device.total_bytes, usable),
        why="--budget",
    )


def with_machine(
    plan: Plan, device: Budget, keep: frozenset[str]
) -> tuple[frozenset[str], tuple[str, ...]]:
    """The pins, and those that this machine adds, with their reason."""
    missing = missing_compiler(plan, device)
    if not missing or plan.optimize.compile or "optimize.compile" in keep:
        return keep, ()
    return keep | {"optimize.compile"}, (f"torch.compile stays off: {missing} is missing here",)


def solve(plan: Plan, device: Budget, keep: frozenset[str]) -> Answer:
    """Ask everything of one plan."""
    keep, notes = with_machine(plan, device, keep)
    found = fit(plan, device, keep)
    fitted = found.plan
    if fitted.optimize.compile:
        notes += ("torch.compile is priced like the uncompiled step; the first steps compile",)
    if fitted.optimize.lora_rank and plan.model.name in catalog.models():
        notes += ("adapters here train on a base of new weights, which learns little",)
    for row in OPTIMIZATIONS:
        refusal = row.refusal(fitted)
        if refusal:
            notes += (f"kept: {refusal}",)
    devices = catalog_budgets(plan)
    return Answer(
        given=plan,
        found=found,
        keep=keep,
        notes=notes,
        largest_micro_batch=(
            largest_micro_batch(plan, device), largest_micro_batch(fitted, device),
        ),
        largest_sequence_length=(
            largest_sequence_length(plan, device), largest_sequence_length(fitted, device),
        ),
        smallest_device=smallest_device(plan, devices),
        smallest_device_fitted=smallest_device_fitted(plan, devices, keep),
    )  # fmt: skip


def hopeless(found: Fit) -> str:
    """Why nothing fits: what is needed at least, and what most of it is."""
    phase, component, size = found.floor
    needed, usable = found.after.device_bytes, found.after.budget.usable_bytes
    return (
        f"no settings fit {format_bytes(usable)}: at least {format_bytes(needed)} are needed, "
        f"{format_bytes(size)} of it {component} in {PHASE_WORDS[phase]}"
    )


def text(answer: Answer) -> list[str]:
    """The answer for a person, about 100 columns wide."""
    found, device = answer.found, answer.found.after.budget
    plan = answer.given
    lines = [
        f"{plan.model.name}   {plan.backend} on {device.name} ({format_bytes(device.usable_bytes)} of "
        f"{format_bytes(device.total_bytes)} {device.memory_label} usable: {device.why})",
        "as given: " + _verdict(found.before),
        ("fitted:   " + _verdict(found.after)) if found.fits else hopeless(found),
        "",
    ]
    if found.changes:
        lines.append("what to change" if found.fits else "what needs least")
        rows = [
            [f"  {c.label}", f"{_word(c.before)} -> {_word(c.after)}", c.key] for c in found.changes
        ]
        lines += columns(rows, left=(0, 1, 2))
        altered = ", ".join(found.result_changes)
        lines.append(f"  result: changed by {altered}" if altered else "  result: not changed")
        lines.append(f"  time:   {found.time_factor:.2f}x per token (estimated)")
    else:
        lines.append("nothing to change: no other settings that fit are estimated to be faster")
    if answer.keep:
        lines.append("  kept:   " + ", ".join(sorted(answer.keep)))
    lines += [f"  note:   {note}" for note in answer.notes]
    lines += ["", *columns(_table(found.before, found.after))]
    lines += ["", *columns(_sizes(answer), left=(0, 1, 2))]
    return lines


def _verdict(table: MemoryTable) -> str:
    free = format_bytes(abs(table.free_bytes))
    return f"fits, {free} free" if table.fits else f"does not fit, {free} over"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(before: MemoryTable, after: MemoryTable) -> list[list[str]]:
    """Each component at the peak, and the totals, before and after."""
    rows = [["", "as given", "fitted"]]
    for old, new in zip(before.components, after.components, strict=True):
        sizes = old.at(before.peak_phase), new.at(after.peak_phase)
        if any(sizes):
            rows.append([old.name, *(format_bytes(size) if size else "-" for size in sizes)])
    both = before, after
    rows.append(["peak in", *(table.peak_phase for table in both)])
    for label, field in (
        ("allocated", "peak_bytes"),
        ("reserved", "reserved_bytes"),
        ("device", "device_bytes"),
        ("host", "host_bytes"),
    ):
        rows.append([f"{label} {before.tier}", *(format_bytes(getattr(t, field)) for t in both)])
    return rows


def _sizes(answer: Answer) -> list[list[str]]:
    def shown(value: int | str | None) -> str:
        return "none" if value is None else f"{value:,}" if isinstance(value, int) else value

    plan = answer.given
    return [
        ["", "as given", "fitted"],
        ["largest micro-batch", *map(shown, answer.largest_micro_batch),
         f"rows of {plan.data.sequence_length:,} tokens"],
        ["largest sequence length", *map(shown, answer.largest_sequence_length), "tokens"],
        ["smallest device", shown(answer.smallest_device), shown(answer.smallest_device_fitted),
         "of the catalog; fitted to each"],
    ]  # fmt: skip


def document(answer: Answer) -> dict[str, Any]:
    """The answer as ``fit --json`` prints it; every byte count an integer."""
    found, device = answer.found, answer.found.after.budget
    phase, component, size = found.floor
    given = plans.to_document(answer.given, full=True)
    return {
        "backend": answer.given.backend,
        "device": {
            "name": device.name,
            "kind": device.kind,
            "memory": device.memory_label,
            "total_bytes": device.total_bytes,
            "usable_bytes": device.usable_bytes,
            "usable_because": device.why,
        },
        "fits": found.fits,
        "changes": [
            {"key": c.key, "label": c.label, "before": c.before, "after": c.after}
            for c in found.changes
        ],
        "result_changes": list(found.result_changes),
        "time_factor": round(found.time_factor, 4),
        "kept": sorted(answer.keep),
        "notes": list(answer.notes),
        "given": given,
        "plan": plans.to_document(found.plan, full=True),
        "before": _bytes(found.before),
        "after": _bytes(found.after),
        "floor": None if found.fits else {"phase": phase, "component": component, "bytes": size},
        "largest_micro_batch": _both(answer.largest_micro_batch),
        "largest_sequence_length": _both(answer.largest_sequence_length),
        "smallest_device": _both((answer.smallest_device, answer.smallest_device_fitted)),
    }


def _both(pair: tuple[Any, Any]) -> dict[str, Any]:
    return {"given": pair[0], "fitted": pair[1]}


def _bytes(table: MemoryTable) -> dict[str, Any]:
    return {
        "tier": str(table.tier),
        "components": {c.name: c.at(table.peak_phase) for c in table.components},
        "phases": table.phases,
        "peak_phase": table.peak_phase,
        "peak_bytes": table.peak_bytes,
        "reserved_bytes": table.reserved_bytes,
        "device_bytes": table.device_bytes,
        "host_bytes": table.host_bytes,
        "band_bytes": list(table.band_bytes),
        "fits": table.fits,
    }
