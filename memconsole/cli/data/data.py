"""`memconsole data`: inspect a dataset, or make one."""

from __future__ import annotations

import json as json_module
from typing import Any

import click

from memconsole import typed_json
from memconsole.cli import completing
from memconsole.cli.data.lengths import lengths_words
from memconsole.cli.data.make import make_command
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
    """Look into a dataset before training on it, or make one."""


command.add_command(make_command)


@command.command("inspect")
@click.argument("source")
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
    found = inspection(source, assignments, lengths=lengths)
    if found.get("lengths"):
        plan = plans.apply_settings(plans.replace(Plan(), {"data.source": source}), assignments)
        keep_lengths(plan, typed_json.convert(found["lengths"], Lengths))
    if as_json:
        click.echo(json_module.dumps(found, indent=2))
    else:
        click.echo(text(found))
    ctx.exit(UNUSABLE if found["kind"] == "unusable" else 0)


def text(found: dict[str, Any]) -> str:
    """An inspection as text; everything from the data is sanitized for the terminal."""
    sample = found.get("sample")
    rows = []
    for key, value in found.items():
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
    found: Lengths = typed_json.convert(value, Lengths)
    return found
