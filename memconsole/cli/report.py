"""`memconsole report`: what a run did, estimated next to measured."""

from __future__ import annotations

import json as json_module

import click
import msgspec

from memconsole.cli.progress import summary
from memconsole.cli.tables import columns
from memconsole.runs.directory import find_run
from memconsole.runs.follow import Follower
from memconsole.runs.report import report
from memconsole.units import format_bytes


@click.command()
@click.argument("run", default="latest")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: str, as_json: bool) -> None:
    """Print RUN's losses, epochs and memory, live or finished."""
    found = find_run(run)
    made = report(found)
    if as_json:
        click.echo(json_module.dumps(msgspec.to_builtins(made), indent=2))
        return
    click.echo(summary(Follower(found).poll()))
    if made.epochs:
        rows = [["epoch", "train loss", "validation loss", "minutes"]]
        rows += [
            [str(e.epoch), _loss(e.train_loss), _loss(e.validation_loss), f"{e.minutes:.2f}"]
            for e in made.epochs
        ]
        click.echo("\n".join(["", *columns(rows, left=())]))
    rows = [["memory", "estimated", "measured", "measured/estimated"]]
    for name in ("peak_bytes", "device_bytes", "host_bytes"):
        estimated = getattr(made.memory.estimated, name) if made.memory.estimated else None
        measured = getattr(made.memory.measured, name) if made.memory.measured else None
        ratio = f"{measured / estimated:.2f}" if estimated and measured else "n/a"
        rows.append([name.removesuffix("_bytes"), _bytes(estimated), _bytes(measured), ratio])
    click.echo("\n".join(["", *columns(rows)]))


def _loss(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _bytes(count: int | None) -> str:
    return "n/a" if count is None else format_bytes(count)
