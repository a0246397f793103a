"""`memconsole plan`: the memory table of a plan, each toggle's saving, and whether it fits."""

from __future__ import annotations

import json as json_module
from pathlib import Path

import click

from memconsole.calibration import receipts_here
from memconsole.cli.data.lengths import document as rows_document
from memconsole.cli.data.lengths import lines as rows_lines
from memconsole.cli.data.lengths import row_lengths
from memconsole.cli.exits import Exit
from memconsole.cli.machine.reading import read_devices
from memconsole.cli.options import build_plan, lengths_option, plan_options, timeout_option
from memconsole.cli.plans.cards import cards_document, table_document, table_lines
from memconsole.cli.plans.plan_words import document, text
from memconsole.cli.tables import columns
from memconsole.devices.budget import budget
from memconsole.memory.answers.cards import cards_table, needed
from memconsole.memory.estimate import Lookup, estimate
from memconsole.memory.table import Estimate
from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.data.paths import absolute
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan
from memconsole.plan.plan_file import dumps


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
        click.echo(_settings_text())
        return
    if list_catalog:
        click.echo(_catalog_text())
        return
    plan = build_plan(preset, plan_file, assignments, source)
    if as_toml:
        click.echo(dumps(absolute(plan)), nl=False)
        return
    device = budget(plan, read_devices(plan))
    lookup: Lookup | None = None
    if exact:
        priced, problem, lookup = _exact(plan, device, limit_seconds)
    else:
        priced, problem = estimate(plan, device), ""
    receipts = receipts_here()
    price, priced = receipts.price(lookup), receipts.calibrate(plan, priced)
    needs = needed(plan, priced.table, price)
    on_several = cards_table(plan, device, price) if all_cards else ()
    rows = row_lengths(plan, device, measure=lengths, price=price)
    if as_json:
        words = document(plan, priced, problem) | {
            "rows": rows_document(plan, rows),
            "cards": cards_document(needs),
            **({"cards_table": table_document(on_several)} if all_cards else {}),
        }
        click.echo(json_module.dumps(words, indent=2))
    else:
        lines = [text(plan, priced, needs), "", *rows_lines(plan, rows)]
        lines += ["", *table_lines(on_several, device)] if all_cards else []
        click.echo("\n".join(lines))
    if problem:
        click.echo(f"memconsole: not exact: {problem}", err=True)
        ctx.exit(Exit.NOT_EXACT)
    ctx.exit(0 if priced.table.fits else Exit.DOES_NOT_FIT)


def _exact(plan: Plan, device: Budget, limit_seconds: float) -> tuple[Estimate, str, Lookup]:
    """The estimate with traced or compiled numbers, the reason if there are none, and what finds such numbers."""
    from memconsole.cli.plans.exact import wait_for_exact
    from memconsole.memory.tracers.exact_book import ExactBook

    estimate(plan, device)  # Refuses a plan that cannot be priced before a tracer starts.
    book = ExactBook()
    try:
        problem = wait_for_exact(book, plan, device, limit_seconds)
        return estimate(plan, device, book.lookup), problem, book.lookup
    finally:
        book.close()


def _settings_text() -> str:
    rows = [["key", "default", "expects", ""]]
    for setting in plans.SETTINGS.values():
        default = "none" if setting.default is None else str(setting.default)
        rows.append([setting.key, default, setting.expects, setting.help])
    return "\n".join(columns(rows, left=(0, 1, 2, 3)))


def _catalog_text() -> str:
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
