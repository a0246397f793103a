"""`memconsole data`: inspect a dataset, cut windows, or make a dataset."""

from __future__ import annotations

import json as json_module
from typing import Any

import click

from memconsole import typed_json
from memconsole.cli import completing
from memconsole.cli.data.lengths import lengths_words
from memconsole.cli.data.make import make_command
from memconsole.cli.data.windows import windows_command
from memconsole.cli.tables import columns
from memconsole.inspection import inspection
from memconsole.memory.answers.lengths import keep_lengths
from memconsole.plan import plan as plans
from memconsole.plan.data.lengths import Lengths
from memconsole.plan.plan import Plan
from memconsole.sanitize import clean, clean_line
from memconsole.units import format_bytes, format_count

UNUSABLE = 2


@click.group()
def command() -> None:
    """Look into a dataset before training on it, cut a table into windows, or make a dataset."""


command.add_command(make_command)
command.add_command(windows_command)


@command.command("inspect")
@click.argument("source", shell_complete=completing.sources)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=completing.assignments,
    help="As for plan.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--lengths/--no-lengths", default=True, help="Tokenize documents and report their lengths."
)
@click.pass_context
def inspect_command(
    ctx: click.Context, source: str, assignments: tuple[str, ...], as_json: bool, lengths: bool
) -> None:
    """Say what SOURCE holds: a catalog name, a path, hf://owner/name or *.h5.

    A separate process reads it, the way the trainer does. Lengths are remembered for plan and fit.
    Ends with exit code 2 when no run can train on it.
    """
    report = inspection(source, assignments, lengths=lengths)
    if report.get("lengths"):
        plan = plans.apply_settings(plans.replace(Plan(), {"data.source": source}), assignments)
        keep_lengths(plan, typed_json.convert(report["lengths"], Lengths))
    if as_json:
        click.echo(json_module.dumps(report, indent=2))
    else:
        click.echo(text(report))
    ctx.exit(UNUSABLE if report["kind"] == "unusable" else 0)


def text(report: dict[str, Any]) -> str:
    """An inspection as text; everything from the data is sanitized for the terminal."""
    sample = report.get("sample")
    rows = []
    for key, value in report.items():
        if key == "sample":
            continue
        if key == "lengths" and value:
            rows.append(["tokens per document", clean_line(lengths_words(_lengths_of(value)))])
            continue
        if value in (None, "", [], {}):
            continue
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if isinstance(value, int) and not isinstance(value, bool):
            shown = format_bytes(value) if key.endswith("bytes") else format_count(value)
        rows.append([clean_line(key.replace("_", " ")), clean_line(shown)])
    lines = columns(rows, left=(0, 1))
    if sample:
        lines += ["", clean(str(sample))]
    return "\n".join(lines)


def _lengths_of(value: Any) -> Lengths:
    lengths: Lengths = typed_json.convert(value, Lengths)
    return lengths
