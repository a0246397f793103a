"""`memconsole train`: launch a run and follow it with plain lines."""

from __future__ import annotations

import contextlib
import json as json_module
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

from memconsole.announcing import after_words, launch_rows, name_words
from memconsole.calibration import calibrated_here
from memconsole.cli import completing, output
from memconsole.cli.exits import Exit
from memconsole.cli.machine.reading import read_devices
from memconsole.cli.options import build_plan, plan_options
from memconsole.cli.runs.memory_report import document, memory_lines, remedies_after, remedy_lines
from memconsole.cli.runs.progress import ProgressLines, summary
from memconsole.cli.tables import columns
from memconsole.devices.reading import Devices
from memconsole.plan.plan import Plan
from memconsole.runs.act.control import request
from memconsole.runs.act.waiting import check_after, is_going
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.report.report import report
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.record import labels
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.names import check_name
from memconsole.runs.record.run_store import find_run
from memconsole.runs.record.states import LIVE, OUT_OF_MEMORY
from memconsole.start import check_launch, devices_then, start
from memconsole.units import format_bytes

POLL_SECONDS = 0.5


@click.command()
@plan_options
@click.option("--detach", is_flag=True, help="Print the run's id and leave it training.")
@click.option(
    "--name", metavar="TEXT", help="A name for the run; by default model and data, with a number."
)
@click.option(
    "--on",
    "where",
    type=click.Choice(("here", "slurm")),
    help="Where it trains: this machine, or a job of a Slurm cluster (see launch.… of --set).",
)
@click.option(
    "--after",
    metavar="RUN",
    shell_complete=completing.run_names,
    help="Start once RUN of this machine has ended, however it ends.",
)
@click.option("--force", is_flag=True, help="Launch even if the estimate does not fit.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the report as JSON at the end; with --detach, an object with the id.",
)
@click.pass_context
def command(
    ctx: click.Context,
    preset: str | None,
    plan_file: Path | None,
    assignments: tuple[str, ...],
    source: str | None,
    detach: bool,
    name: str | None,
    where: str | None,
    after: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Train a plan. The run goes on if this command or its terminal goes away.

    Ctrl-C asks the run to checkpoint and stop; a second Ctrl-C returns without waiting for it.
    """
    if where is not None:
        assignments = (*assignments, f"launch.on={where}")
    plan = build_plan(preset, plan_file, assignments, source)
    first = None if after is None else live_run(after, plan)
    if detach:
        devices = _tell(plan, name, first, force=force, quiet=True)
        with Interrupts() as interrupts:
            run = _launch(plan, name, devices, first)
            with _naming(run):
                click.echo(json_module.dumps({"id": run.id}) if as_json else run.id)
            if interrupts.count:
                _ask_to_stop(run)
        return
    ctx.exit(train_in_foreground(plan, name=name, after=first, json=as_json, force=force))


def live_run(reference: str, plan: Plan, run: RunDirectory | None = None) -> RunDirectory | None:
    """The run that `plan`, the plan of `run` or of a new run, is to start after; None, with a word about it, if it has
    ended. Raises `RunError`."""
    found = find_run(reference)
    check_after(plan, found, run)
    if is_going(found):
        return found
    click.echo(f"run {found.id} ({found.name}) has ended already: this one starts now", err=True)
    return None


def train_in_foreground(
    plan: Plan,
    *,
    name: str | None,
    after: RunDirectory | None = None,
    json: bool,
    force: bool = False,
) -> int:
    """Launch `plan`, print its progress and return the command's exit code."""
    devices = _tell(plan, name, after, force=force, quiet=json)
    with Interrupts() as interrupts:
        run = _launch(plan, name, devices, after)
        with _naming(run):
            click.echo(f"run {run.id}  {run.name}", err=json)
        return follow(run, interrupts, json=json)


class Interrupts:
    """Counts SIGINT, instead of `KeyboardInterrupt`, until the block or `end` ends it."""

    def __init__(self) -> None:
        self.count = 0
        self._previous = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Interrupts:
        signal.signal(signal.SIGINT, self._add)
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def end(self) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _add(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1


def _tell(
    plan: Plan, name: str | None, after: RunDirectory | None, *, force: bool, quiet: bool
) -> Devices | None:
    """Print what the plan will do, on standard error if `quiet`. Returns the devices of this machine, as far as they
    are known for the time when the run starts."""
    if name is not None:
        labels.check_not_empty(name)
        check_name(name.strip())
    devices = devices_then(read_devices(plan), after)
    found = calibrated_here(plan, check_launch(plan, devices))
    table = found.table
    # The memory of this machine is not that of the cluster's node.
    known = plan.launch.on == "here" or plan.device.name != "cpu"
    if known and not table.fits and not force:
        click.echo(
            f"memconsole: does not fit: {format_bytes(table.device_bytes)} estimated, "
            f"{format_bytes(table.budget.usable_bytes)} usable ({table.budget.why}); "
            "memconsole plan shows what would save memory; --force launches anyway",
            err=True,
        )
        raise SystemExit(Exit.DOES_NOT_FIT)
    said = launch_rows(plan, found)
    if after is not None:
        said = (("start", after_words(after)), *said)
    rows = [[f"  {label}", words] for label, words in said]
    click.echo("\n".join(columns(rows, left=(0, 1))), err=quiet)
    return devices


def _launch(
    plan: Plan, name: str | None, devices: Devices | None, after: RunDirectory | None
) -> RunDirectory:
    run = start(plan, name, devices, after=after)
    if words := name_words(run, name):
        click.echo(words, err=True)
    return run


def follow(run: RunDirectory, interrupts: Interrupts, *, json: bool = False) -> int:
    """Print progress until the run ends. Returns the exit code for how it ended.

    The first of `interrupts` asks the run to stop; the second one returns.
    """
    follower = Follower(run)
    lines = ProgressLines()
    asked = False
    while True:
        snapshot = follower.poll()
        if interrupts.count and not asked and snapshot.state in LIVE:
            asked = True
            _ask_to_stop(run)
        with _naming(run, asked):
            for line in lines.new(snapshot):
                click.echo(line, err=json)
        if snapshot.state not in LIVE:
            break
        if interrupts.count > 1:
            click.echo(f"not waiting for it to stop; memconsole attach {run.id} shows it", err=True)
            return Exit.RESUMABLE
        time.sleep(POLL_SECONDS)
    interrupts.end()
    made = report(run)
    devices = read_devices() if made.verdict.reason in OUT_OF_MEMORY else None
    if json:
        click.echo(json_module.dumps(document(run, made, devices), indent=2))
    else:
        click.echo(summary(snapshot))
        click.echo("\n".join(["", *memory_lines(made.memory)]))
        if helped := remedy_lines(remedies_after(run, made, devices)):
            click.echo("\n".join(["", *helped]))
    return exit_code(snapshot)


@contextlib.contextmanager
def _naming(run: RunDirectory, asked: bool = False) -> Iterator[None]:
    """Say which run goes on, or is stopping if that was `asked`, if its progress cannot be printed."""
    try:
        yield
    except OSError as error:
        if not output.failed(error):
            raise
        does = "is stopping" if asked else "goes on"
        words = f"; run {run.id} {does}; memconsole attach {run.id} shows it"
        raise output.OutputError(error, words) from None


def _ask_to_stop(run: RunDirectory) -> None:
    try:
        begun = request(run, "stop", "memconsole train (Ctrl-C)")
    except RunError as error:  # as of a run that has ended meanwhile
        click.echo(str(error), err=True)
        return
    words = "stopping: finishing the step, then a checkpoint" if begun else "cancelled"
    click.echo(words, err=True)


def exit_code(snapshot: RunSnapshot) -> int:
    """0 finished, 75 stopped and resumable, 2 the plan was refused, 1 otherwise."""
    if snapshot.verdict is not None and snapshot.verdict.reason == "bad_plan":
        return Exit.BAD_PLAN
    return {"finished": 0, "stopped": Exit.RESUMABLE}.get(snapshot.state, 1)
