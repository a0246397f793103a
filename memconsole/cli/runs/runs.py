"""`memconsole runs`: every run, live first."""

from __future__ import annotations

import json as json_module
import time

import click
import msgspec

from memconsole.cli.tables import columns
from memconsole.runs.read.follow import RunStatus, status
from memconsole.runs.read.missing import MARK, missing_words
from memconsole.runs.record.directory import list_runs
from memconsole.runs.record.states import LIVE
from memconsole.units import format_duration


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--live", is_flag=True, help="Only runs that are training.")
def command(as_json: bool, live: bool) -> None:
    """List runs, live first, then newest first."""
    found = [status(run) for run in list_runs()]
    if live:
        found = [run for run in found if run.state in LIVE]
    found.sort(key=lambda run: (run.state not in LIVE, -run.created_wall))
    if as_json:
        click.echo(json_module.dumps(msgspec.to_builtins(found), indent=2))
        return
    if not found:
        click.echo("no runs yet: memconsole train starts one")
        return
    rows = [["run", "name", "state", "model", "backend", "step", "loss", "age"]]
    rows += [_row(run) for run in found]
    click.echo("\n".join(columns(rows, left=(0, 1, 2, 3, 4))))
    for run in found:
        if run.unsaved:
            click.echo(f"\n{run.id} {run.unsaved}")
    _echo_list("damaged", [(run.id, run.damaged) for run in found if run.damaged])
    missing = [(run.id, missing_words(n)) for run in found if (n := run.missing_records)]
    _echo_list("damaged records", missing)
    refused = [(run.id, run.refused) for run in found if run.refused]
    _echo_list("refused before anything was trained", refused)


def _echo_list(heading: str, lines: list[tuple[str, str]]) -> None:
    """Print what concerns some runs only; nothing if it concerns none."""
    if lines:
        click.echo(f"\n{heading}:")
        click.echo("\n".join(f"  {run_id}: {words}" for run_id, words in lines))


def _row(run: RunStatus) -> list[str]:
    total = f"/{run.total_steps:,}" if run.total_steps else ""
    return [
        run.id,
        run.name,
        "refused" if run.refused else _state(run),
        run.model,
        run.backend,
        f"{run.step:,}{total}",
        ("-" if run.loss is None else f"{run.loss:.4f}") + (MARK if run.missing_records else ""),
        format_duration(max(0.0, time.time() - run.created_wall)),
    ]


def _state(run: RunStatus) -> str:
    if run.unsaved:
        return "cannot save"
    if run.damaged and run.state not in LIVE:
        return "damaged"
    waits = run.state in ("running", "unsupervised") and run.phase == "paused"
    return "paused" if waits else run.state
