"""`memconsole fit`: the fastest settings of a plan that fit a budget, and the size limits."""

from __future__ import annotations

import json as json_module
from pathlib import Path

import click
import msgspec

from memconsole.calibration import Receipts
from memconsole.cli import completing
from memconsole.cli.data.lengths import document as rows_document
from memconsole.cli.data.lengths import lines as rows_lines
from memconsole.cli.data.lengths import row_lengths
from memconsole.cli.exits import Exit
from memconsole.cli.machine.reading import read_devices
from memconsole.cli.options import build_plan, lengths_option, plan_options, timeout_option
from memconsole.cli.plans.fit_exact import fit_exactly, known
from memconsole.cli.plans.fit_words import ALLOW, FitReport, document, hopeless, text
from memconsole.devices.budget import budget
from memconsole.devices.planned import catalog_budgets, devices_allowed, missing_compiler
from memconsole.memory.answers.advice import largest_micro_batch, largest_sequence_length
from memconsole.memory.answers.cards import needed
from memconsole.memory.answers.solve import (
    Fit,
    Price,
    faster,
    fit,
    smallest_device,
    smallest_device_fitted,
)
from memconsole.memory.estimate import table_of
from memconsole.memory.table import MemoryTable
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan as plans
from memconsole.plan.data.paths import absolute
from memconsole.plan.differences import differing
from memconsole.plan.machine.budget import SEVERAL, Budget
from memconsole.plan.plan import Plan, PlanError, quote
from memconsole.plan.plan_file import dumps
from memconsole.plan.sections.words import meant
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole.plan.toggles.sharding import SAID
from memconsole.plan.training import recipe
from memconsole.plan.training.origin import frozen_at_random, refused_base
from memconsole.units import MIB, parse_bytes

LEAST_BUDGET = MIB
"""A smaller budget was probably given without its unit."""


@click.command()
@plan_options
@click.option("--budget", "amount", metavar="SIZE", help="Usable memory instead, as in 12GiB.")
@click.option(
    "--keep",
    multiple=True,
    metavar="KEY",
    shell_complete=completing.kept,
    help="Leave this setting as it is.",
)
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(list(ALLOW)),
    help="A change of the training result that is allowed from the start; may be given several times.",
)
@click.option(
    "--devices",
    "most",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Use at most N devices; by default those of this machine, or device.count.",
)
@click.option("--exact", is_flag=True, help="Decide by traced or compiled numbers; takes minutes.")
@timeout_option
@lengths_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--toml", "as_toml", is_flag=True, help="Print the fitted plan file instead.")
@click.pass_context
def command(
    ctx: click.Context,
    preset: str | None,
    plan_file: Path | None,
    assignments: tuple[str, ...],
    source: str | None,
    amount: str | None,
    keep: tuple[str, ...],
    allow: tuple[str, ...],
    most: int | None,
    exact: bool,
    limit_seconds: float,
    lengths: bool,
    as_json: bool,
    as_toml: bool,
) -> None:
    """Find the settings that fit the device, its band included, in the shortest estimated time.

    Changes that keep the training result come first, together with those that --allow names. Rows
    per step and tokens per row stay the same. Ends with exit code 3 when no settings fit.
    """
    plan = build_plan(preset, plan_file, assignments, source)
    pinned = frozenset(kept_key(word) for word in keep)
    allowed = frozenset(ALLOW[word] for word in allow)
    readings = read_devices(plan)
    device = budget(plan, readings)
    here = devices_allowed(plan, readings, device)
    most = here if most is None else several(most, device)
    if amount is not None:
        device = limited(device, amount)
    pinned, notes = with_machine(plan, device, pinned)
    book = ExactBook() if exact else None
    try:
        problem = ""
        receipts = Receipts()
        receipts.refresh()

        def calibrated(other: Plan, on: Budget) -> MemoryTable:
            return receipts.calibrate_table(other, table_of(other, on))

        price: Price = calibrated
        lookup = None
        if book is None:
            found = fit(plan, device, pinned, price, allowed, most)
        else:
            found, problem = fit_exactly(book, plan, device, pinned, limit_seconds, allowed, most)
            price, lookup = known(book), book.lookup
        if as_toml:
            _print_toml(found)
        else:
            report = report_of(
                plan, found, pinned, (*notes, *devices_words(found, here)), price, most
            )
            slower = receipts.slowdown(found.plan, device)
            pace = slower.factor if slower is not None else 1.0
            report = msgspec.structs.replace(report, pace=pace)
            rows = row_lengths(found.plan, device, measure=lengths, lookup=lookup)
            if as_json:
                words = document(report) | {
                    "rows": rows_document(found.plan, rows),
                    "exact_problem": problem,
                }
                click.echo(json_module.dumps(words, indent=2))
            else:
                click.echo("\n".join([*text(report), "", *rows_lines(found.plan, rows)]))
    finally:
        if book is not None:
            book.close()
    if problem:
        click.echo(f"memconsole: not exact: {problem}", err=True)
        ctx.exit(Exit.NOT_EXACT)
    ctx.exit(0 if found.fits else Exit.DOES_NOT_FIT)


def _print_toml(found: Fit) -> None:
    if found.fits:
        click.echo(dumps(absolute(found.plan)), nl=False)
    else:
        click.echo(f"memconsole: {hopeless(found)}", err=True)


def kept_key(word: str) -> str:
    """The setting that `word` names: a key, or its last part if that is unambiguous.

    Raises `PlanError`.
    """
    if word in plans.SETTINGS:
        return word
    tails = [key for key in plans.SETTINGS if key.rpartition(".")[2] == word]
    if len(tails) == 1:
        return tails[0]
    found = meant(word, plans.SETTINGS)
    if len(found) == 1:
        return found[0]
    known = ", ".join(row.key for row in OPTIMIZATIONS)
    raise PlanError(f"--keep {quote(word)}: unknown key{plans.hint(word) or f'; known: {known}'}")


def limited(device: Budget, amount: str) -> Budget:
    """`device` with the usable bytes from --budget. Raises `PlanError`."""
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


def several(most: int, device: Budget) -> int:
    """`most` from --devices. Raises `PlanError` if there is only one device of this kind in a machine."""
    if most > 1 and device.kind not in SEVERAL:
        raise PlanError(
            f"--devices {most}: {device.name} is one device, whose memory and cores several processes would "
            "share; expected 1, or a GPU or TPU in device.name"
        )
    return most


def devices_words(found: Fit, here: int) -> tuple[str, ...]:
    """What a fitted plan on several devices means; or, if no settings fit, on how many devices they would."""
    count, device = found.plan.device.count, found.after.budget
    words = []
    if found.fits and count > 1:
        how = found.plan.optimize.sharding
        words.append(
            f"{how} on {count:,} devices: {SAID[how]}; {found.plan.effective_batch:,} rows per step as before"
        )
        if device.local and count > here:
            words.append(f"this machine has {here:,} of these devices with as much free memory")
    needs = None if found.fits else needed(found.plan, found.after)
    if needs is not None:
        words.append("what needs least " + needs.words)
    return tuple(words)


def with_machine(
    plan: Plan, device: Budget, keep: frozenset[str]
) -> tuple[frozenset[str], tuple[str, ...]]:
    """The settings to keep: the given ones and those that this machine forces, with the reasons."""
    missing = missing_compiler(plan, device)
    if not missing or plan.optimize.compile or "optimize.compile" in keep:
        return keep, ()
    return keep | {"optimize.compile"}, (f"torch.compile stays off: {missing} is missing here",)


def report_of(
    plan: Plan,
    found: Fit,
    keep: frozenset[str],
    notes: tuple[str, ...] = (),
    price: Price = table_of,
    devices: int | None = None,
) -> FitReport:
    """The report of a fit: the fit, notes, and the largest and smallest sizes that work."""
    device = found.after.budget
    fitted = found.plan
    if fitted.optimize.compile:
        torch = fitted.backend == "torch"
        notes += ("the first steps compile" if torch else "each block is compiled at the start",)
    if frozen := frozen_at_random(fitted):
        notes += (frozen,)
    if refused := refused_base(fitted):
        notes += (refused,)
    for row in OPTIMIZATIONS:
        refusal = row.refusal(fitted, kind=device.kind)
        if refusal:
            notes += (f"kept: {refusal}",)
    if note := recipe.kept_rate(plan, fitted):
        notes += (note,)
    if found.after.verdict is Verdict.TIGHT:
        notes += ("tight: no settings leave room for the whole band",)
    if found.only_tight is not None:
        notes += (_only_tight(plan, found.only_tight),)
    budgets = catalog_budgets(plan)
    return FitReport(
        given=plan,
        found=found,
        keep=keep,
        notes=notes,
        largest_micro_batch=(
            largest_micro_batch(plan, device, price), largest_micro_batch(fitted, device, price),
        ),
        largest_sequence_length=(
            largest_sequence_length(plan, device, price),
            largest_sequence_length(fitted, device, price),
        ),
        smallest_device=smallest_device(plan, budgets),
        smallest_device_fitted=smallest_device_fitted(
            plan, budgets, keep, allow=frozenset(found.allowed)
        ),
        faster=faster(plan, device, found, keep, price, devices),
    )  # fmt: skip


def _only_tight(plan: Plan, tight: Plan) -> str:
    """A note on a plan that changes the result less, but is tight."""
    found = differing([plan, tight])
    settings = ", ".join(f"{key} = {plans.written(value)}" for key, (_, value) in found.items())
    return f"with less change of the result, but tight: {settings or 'the plan as given'}"
