"""`memconsole report`: what a run did, estimated next to measured."""

from __future__ import annotations

import json as json_module

import click

from memconsole.cli.completing import run_names
from memconsole.cli.machine.reading import read_devices
from memconsole.cli.runs.memory_report import document, memory_lines, remedies_after, remedy_lines
from memconsole.cli.runs.progress import summary
from memconsole.cli.tables import columns
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.report.report import report
from memconsole.runs.read.shown.missing import MARK
from memconsole.runs.read.shown.snapshot import Symptom
from memconsole.runs.record.run_store import find_run
from memconsole.runs.record.states import OUT_OF_MEMORY
from memconsole.units import format_measure


@click.command()
@click.argument("run", default="latest", shell_complete=run_names)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: str, as_json: bool) -> None:
    """Print RUN's losses, epochs and memory, live or finished."""
    found = find_run(run)
    made = report(found)
    devices = read_devices() if made.verdict.reason in OUT_OF_MEMORY else None
    if as_json:
        click.echo(json_module.dumps(document(found, made, devices), indent=2))
        return
    click.echo(summary(Follower(found).poll()))
    if made.epochs:
        rows = [["epoch", "train loss", "validation loss", "minutes"]]
        rows += [
            [str(e.epoch), _loss(e.train_loss), _loss(e.validation_loss), f"{e.minutes:.2f}"]
            for e in made.epochs
        ]
        if "epochs" in made.uncertain:
            rows.append([MARK, "epochs may be missing", "", ""])
        click.echo("\n".join(["", *columns(rows, left=())]))
    if made.ladder:
        click.echo("\n".join(["", *(rung.words for rung in made.ladder)]))
    click.echo("\n".join(["", *memory_lines(made.memory, made.uncertain)]))
    for symptom in made.symptoms:
        click.echo("\n".join(["", *symptom_lines(symptom)]))
    if helped := remedy_lines(remedies_after(found, made, devices)):
        click.echo("\n".join(["", *helped]))


def symptom_lines(symptom: Symptom) -> list[str]:
    """What went wrong, and a row per setting that acts on it."""
    rows = [["  " + one.options, one.words] for one in symptom.helps]
    return [symptom.words, *columns(rows, left=(0, 1))]


def _loss(value: float | None) -> str:
    return "n/a" if value is None else format_measure(value)
