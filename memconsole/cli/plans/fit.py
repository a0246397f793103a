"""`memconsole fit`: the fastest settings of a plan that fit a budget, and the size limits."""

from __future__ import annotations

import json as json_module
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import click

from memconsole.calibration import receipts_here
from memconsole.cli import completing
from memconsole.cli.data.lengths import RowLengths, row_lengths
from memconsole.cli.data.lengths import document as rows_document
from memconsole.cli.data.lengths import lines as rows_lines
from memconsole.cli.exits import Exit
from memconsole.cli.machine.reading import read_devices
from memconsole.cli.options import build_plan, lengths_option, plan_options, timeout_option
from memconsole.cli.plans.fit_exact import fit_exactly
from memconsole.cli.plans.fit_options import (
    ALLOW,
    check_device_count,
    kept_key,
    kept_on_machine,
    with_usable_bytes,
)
from memconsole.cli.plans.fit_report import FitReport, fit_report
from memconsole.cli.plans.fit_words import document, hopeless, text
from memconsole.devices.budget import budget
from memconsole.devices.planned import devices_allowed
from memconsole.memory.answers.solve import Fit, fit
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.plan.data.paths import absolute
from memconsole.plan.plan_file import dumps


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
    if as_toml and (as_json or lengths):
        ctx.fail("--toml prints the fitted plan alone; leave out --json and --lengths")
    plan = build_plan(preset, plan_file, assignments, source)
    kept = frozenset(kept_key(word) for word in keep)
    allowed = frozenset(ALLOW[word] for word in allow)
    readings = read_devices(plan)
    device = budget(plan, readings)
    devices_here = devices_allowed(plan, readings, device)
    if most is None:
        most = devices_here
    else:
        check_device_count(most, device)
    if amount is not None:
        device = with_usable_bytes(device, amount)
    kept, notes = kept_on_machine(plan, device, kept)
    receipts = receipts_here()
    tracers: AbstractContextManager[ExactBook | None] = (
        closing(ExactBook()) if exact else nullcontext()
    )
    with tracers as book:
        if book is None:
            problem, price = "", receipts.price()
            fitted = fit(plan, device, kept, price, allowed, most)
        else:
            price = receipts.price(book.lookup)
            fitted, problem = fit_exactly(
                book, plan, device, kept, limit_seconds, allowed, most, price
            )
        if as_toml:
            _print_toml(fitted)
        else:
            slowdown = receipts.slowdown(fitted.plan, device)
            report = fit_report(
                plan,
                fitted,
                kept,
                notes,
                price,
                devices=most,
                devices_here=devices_here,
                pace=1.0 if slowdown is None else slowdown.factor,
            )
            _print(
                report,
                row_lengths(fitted.plan, device, measure=lengths, price=price),
                problem,
                as_json,
            )
    if problem:
        click.echo(f"memconsole: not exact: {problem}", err=True)
        ctx.exit(Exit.NOT_EXACT)
    ctx.exit(0 if fitted.fits else Exit.DOES_NOT_FIT)


def _print(report: FitReport, rows: RowLengths, problem: str, as_json: bool) -> None:
    if as_json:
        words = document(report) | {
            "rows": rows_document(report.fit.plan, rows),
            "exact_problem": problem,
        }
        click.echo(json_module.dumps(words, indent=2))
    else:
        click.echo("\n".join([*text(report), "", *rows_lines(report.fit.plan, rows)]))


def _print_toml(fitted: Fit) -> None:
    if fitted.fits:
        click.echo(dumps(absolute(fitted.plan)), nl=False)
    else:
        click.echo(f"memconsole: {hopeless(fitted)}", err=True)
