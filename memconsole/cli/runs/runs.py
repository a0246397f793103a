"""`memconsole runs`: every run, live first."""

from __future__ import annotations

import json as json_module
import time

import click
import msgspec

from memconsole.cli import completing
from memconsole.cli.runs.keeping import delete, note, rename, send, tag
from memconsole.cli.tables import columns
from memconsole.runs.read.follow import status
from memconsole.runs.read.shown.missing import MARK, missing_words
from memconsole.runs.read.shown.status import RunStatus
from memconsole.runs.read.shown.words import state_word
from memconsole.runs.record.run_store import list_runs
from memconsole.runs.record.states import LIVE
from memconsole.units import format_bytes, format_duration, format_measure

HEADS = (
    *("run", "name", "state", "model", "backend", "step", "loss"),
    *("validation", "peak", "duration", "age", "tags"),
)
NAME_WIDTH = 40
"""Characters of a name in the table; a longer one is cut."""


@click.group(invoke_without_command=True)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON list; `word` is the state as listed here."
)
@click.option("--live", is_flag=True, help="Only runs that are training.")
@click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="TAG",
    shell_complete=completing.tags,
    help="Only runs that have this tag.",
)
@click.pass_context
def command(ctx: click.Context, as_json: bool, live: bool, tags: tuple[str, ...]) -> None:
    """List runs, live first, then newest first; or rename, tag, note or delete one.

    `validation` is the best figure so far, `peak` the highest measured memory, `duration` the wall
    time of all attempts.
    """
    if ctx.invoked_subcommand is not None:
        if as_json or live or tags:
            ctx.fail(f"--json, --live and --tag are for the list, not for {ctx.invoked_subcommand}")
        return
    runs = list_runs()
    found = [status(run) for run in runs]
    found = [run for run in found if set(tags) <= set(run.tags)]
    if live:
        found = [run for run in found if run.state in LIVE]
    found.sort(key=lambda run: run.state not in LIVE)
    if as_json:
        click.echo(json_module.dumps([_document(run) for run in found], indent=2))
        return
    if not found:
        none = "no such run" if tags else "no run is live"
        click.echo(none if runs else "no runs yet: memconsole train starts one")
        return
    rows = [_row(run) for run in found]
    shown = [n for n, head in enumerate(HEADS) if head != "tags" or any(run.tags for run in found)]
    table = [[row[n] for n in shown] for row in (list(HEADS), *rows)]
    click.echo("\n".join(columns(table, left=(0, 1, 2, 3, 4, HEADS.index("tags")))))
    for run in found:
        if run.unsaved:
            click.echo(f"\n{run.id} {run.unsaved}")
    _echo_list("notes", [(run.id, " ".join(run.note.split())) for run in found if run.note])
    _echo_list("on a cluster", [(run.id, run.job) for run in found if run.job])
    _echo_list("waiting", [(run.id, run.waits) for run in found if run.waits])
    _echo_list("damaged", [(run.id, run.damaged) for run in found if run.damaged])
    other = [(run.id, run.other_version) for run in found if run.other_version]
    _echo_list("of another version", other)
    missing = [(run.id, missing_words(n)) for run in found if (n := run.missing_records)]
    _echo_list("damaged records", missing)
    refused = [(run.id, run.refused) for run in found if run.refused]
    _echo_list("refused before anything was trained", refused)


for one in (rename, tag, note, delete, send):
    command.add_command(one)


def _document(run: RunStatus) -> dict[str, object]:
    return {**msgspec.to_builtins(run), "word": state_word(run)}


def _echo_list(heading: str, lines: list[tuple[str, str]]) -> None:
    """Print a heading, and a line for each run that it concerns; nothing if there are none."""
    if lines:
        click.echo(f"\n{heading}:")
        click.echo("\n".join(f"  {run_id}: {words}" for run_id, words in lines))


def _row(run: RunStatus) -> list[str]:
    total = f"/{run.total_steps:,}" if run.total_steps else ""
    return [
        run.id,
        run.name if len(run.name) <= NAME_WIDTH else f"{run.name[: NAME_WIDTH - 1]}…",
        state_word(run),
        run.model,
        run.backend,
        f"{run.step:,}{total}",
        _figure(run.loss, run),
        _best(run),
        "-" if run.peak_bytes is None else format_bytes(run.peak_bytes) + _mark(run),
        format_duration(run.duration_seconds),
        format_duration(max(0.0, time.time() - run.created_wall)),
        ",".join(run.tags),
    ]


def _best(run: RunStatus) -> str:
    by = "" if run.best_by in ("", "loss") else f" {run.best_by}"
    return _figure(run.best, run) + by


def _figure(value: float | None, run: RunStatus) -> str:
    return ("-" if value is None else format_measure(value)) + _mark(run)


def _mark(run: RunStatus) -> str:
    return MARK if run.missing_records else ""
