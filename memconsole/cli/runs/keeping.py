"""`memconsole runs rename|tag|note|send|delete`: change a run's labels, send its figures, delete its files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import click

from memconsole.cli import completing
from memconsole.cli.asking import ask
from memconsole.plan.machine.trackers import NAMES, check_trackers
from memconsole.runs.act.delete import Begun, check_deletable, delete_run
from memconsole.runs.act.trackers import start_trackers
from memconsole.runs.record import labels
from memconsole.runs.record.directory import RunDirectory, WriteError
from memconsole.runs.record.names import rename_run
from memconsole.runs.record.run_store import find_run
from memconsole.units import format_bytes


@click.command()
@click.argument("run", shell_complete=completing.run_names)
@click.argument("name")
def rename(run: str, name: str) -> None:
    """Give RUN another NAME, which no other run has. It may be training: its id, folder and files stay
    the same."""
    found = find_run(run)
    with _writing(found):
        kept = rename_run(found, name, os.environ)
    click.echo(f"{found.id} is called {kept}")


@click.command()
@click.argument("run", shell_complete=completing.run_names)
@click.argument("tags", nargs=-1)
@click.option(
    "--remove",
    "removed",
    multiple=True,
    metavar="TAG",
    shell_complete=completing.tags,
    help="Remove a tag.",
)
def tag(run: str, tags: tuple[str, ...], removed: tuple[str, ...]) -> None:
    """Add TAGS to RUN, or remove some. Without any, print the tags of RUN."""
    found = find_run(run)
    with _writing(found):
        if tags or removed:
            kept = labels.tag(found.path, tags, removed, os.environ)
        else:
            kept = labels.read_labels(found.path).tags
    click.echo(f"{found.id}: {', '.join(kept) or 'no tags'}")


@click.command()
@click.argument("run", shell_complete=completing.run_names)
@click.argument("text", required=False)
def note(run: str, text: str | None) -> None:
    """Keep TEXT as the note of RUN; "" removes it. Without TEXT, print it."""
    found = find_run(run)
    with _writing(found):
        if text is not None:
            labels.note(found.path, text, os.environ)
    click.echo(labels.read_labels(found.path).note or f"{found.id} has no note")


@click.command()
@click.argument("run", shell_complete=completing.run_names)
def send(run: str) -> None:
    """Send the figures of RUN that its trackers (W&B, MLflow) lack, in the background.

    A run sends them by itself. This is for figures that could not be sent until ten minutes after
    its end, because a server or the network was down.
    """
    found = find_run(run)
    check_trackers(found.read_plan())
    kinds = start_trackers(found)
    names = " and ".join(NAMES[kind] for kind in kinds)
    click.echo(f"{found.id}: {f'sending to {names}' if kinds else 'its plan names no tracker'}")


@click.command()
@click.argument("runs", nargs=-1, required=True, shell_complete=completing.run_names)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def delete(runs: tuple[str, ...], yes: bool) -> None:
    """Delete all files of RUNS, checkpoints included. A run that is training is never deleted."""
    found = list(dict.fromkeys(find_run(run) for run in runs))
    begun = Begun()
    for run in found:
        check_deletable(run, begun)
    if not yes:
        for run in found:
            click.echo(_described(run, begun))
        these = "this run" if len(found) == 1 else f"these {len(found)} runs"
        ask(f"Delete {these} for good?")
    for run in found:
        delete_run(run, begun)
        click.echo(f"deleted {run.id}")


def _described(run: RunDirectory, begun: Begun) -> str:
    files = [path for path in run.path.rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_size for path in files)
    others = ", ".join(other.id for other in begun.of(run))
    more = f"; these started from its weights: {others}" if others else ""
    return f"{run.id}  {run.name}  {format_bytes(size)}{more}"


@contextlib.contextmanager
def _writing(run: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"run {run.id}: {run.path / labels.FILE} cannot be written: {error.strerror}"
        ) from None
