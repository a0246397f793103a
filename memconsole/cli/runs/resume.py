"""`memconsole resume`: continue a paused run, or restart an ended one from its last checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from memconsole.cli import completing
from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.models.files import TOKENIZER_JSON
from memconsole.plan.plan import Plan, PlanError, quote
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole.plan.training import resuming
from memconsole.runs.act import launch
from memconsole.runs.act.control import request
from memconsole.runs.read.life.ladder import Rung, least_evaluated, rungs
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.read.life.newest import find_paused
from memconsole.runs.record.checkpoints import base
from memconsole.runs.record.checkpoints.manifest import STATE, read_json, step_of
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.processes.identity import user_name
from memconsole.runs.record.requests import pause_asked


@click.command()
@click.argument("run", required=False, shell_complete=completing.run_names)
@click.option("--follow/--detach", "watch", default=False, help="Print its progress.")
@click.option("--changed-data", is_flag=True, help="Continue although the data have changed since.")
@click.option(
    "--from-scratch", is_flag=True, help="Begin again at step 0 if no intact checkpoint is left."
)
@click.option(
    "--after",
    metavar="RUN",
    shell_complete=completing.run_names,
    help="Start once RUN has ended, however it ends.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=completing.assignments,
    help=f"Change a setting: {resuming.MAY_CHANGE} may change.",
)
@click.pass_context
def command(
    ctx: click.Context,
    run: str | None,
    watch: bool,
    changed_data: bool,
    from_scratch: bool,
    after: str | None,
    assignments: tuple[str, ...],
) -> None:
    """Let a paused RUN go on; restart an ended RUN from its newest intact checkpoint.

    Without RUN: the newest paused one, or else the newest of all.

    With --set, more steps or epochs also continue a run that is finished.
    """
    from memconsole.cli.runs.train import Interrupts, follow, live_run

    found = find_paused(run)
    first = None if after is None else live_run(after, found.read_plan(), found)

    def begin() -> None:
        changed = _changed(found, assignments, from_scratch=from_scratch)
        now = liveness(found)
        if now.live and now.state != "queued" and pause_asked(found):
            if changed is not None:
                raise RunError(
                    f"run {found.id} is paused; settings can change only after memconsole stop {found.id}"
                )
            if first is not None:
                raise RunError(
                    f"run {found.id} is paused and keeps its memory; --after is for runs that have ended"
                )
            request(found, "continue", f"{user_name()} (memconsole resume)")
            click.echo(f"{found.id}: goes on")
            return
        words = "" if changed is None else resuming.words(found.read_plan(), changed)
        attempt = launch.resume(
            found,
            changed_data=changed_data,
            from_scratch=from_scratch,
            changed=changed,
            after=first,
        )
        if words:
            click.echo(f"goes on with {words}")
        job = found.job()
        wait = found.waiting()
        waits = f" is in the queue as {job.words}" if job else f" {wait.words}" if wait else ""
        click.echo(f"{found.id}: attempt {attempt}{waits}")

    if not watch:
        begin()
        return
    with Interrupts() as interrupts:
        begin()
        ctx.exit(follow(found, interrupts))


def _changed(run: RunDirectory, assignments: tuple[str, ...], *, from_scratch: bool) -> Plan | None:
    """The run's plan with `assignments` applied; None without any. Raises `PlanError`."""
    if not assignments:
        return None
    before = run.read_plan()
    after = resuming.changed(before, dict(plans.parse_assignments(assignments)))
    if after.device.count != before.device.count:
        check_trainable(after)
    _check_ladder(rungs(run), before, after)
    if not from_scratch:
        _check_length(run, before, after)
    own = run.path / TOKENIZER_JSON
    committed = bool(run.committed_checkpoints())
    present = base.present(run, after, trained=committed)
    check(resuming.without_lost_source(present, own) if committed else present)
    return after


def _check_ladder(taken: Sequence[Rung], before: Plan, after: Plan) -> None:
    """Raise `PlanError` if a setting is changed that a run has to keep after it has halved its batches."""
    if taken and after.device.count != before.device.count:
        raise PlanError(
            f"device.count = {after.device.count}: this run has halved its batches to fit in memory; "
            "resume it as it is",
            "device.count",
        )
    least, asked = least_evaluated(taken), after.train.evaluation_batch_size
    if least is None or asked == before.train.evaluation_batch_size:
        return
    if asked is None or asked > least:
        raise PlanError(
            f"train.evaluation_batch_size = {quote(asked)}: this run has halved it to {least:,} to fit in memory; "
            f"expected at most {least:,}",
            "train.evaluation_batch_size",
        )


def _check_length(run: RunDirectory, before: Plan, after: Plan) -> None:
    """Raise `PlanError` if another number of steps or epochs is one that the run has trained already."""
    saved, asked, earlier = run.committed_checkpoints(), after.train, before.train
    if not saved:
        return
    steps, reached = asked.max_steps, step_of(saved[-1])
    if steps is not None and steps != earlier.max_steps and steps <= reached:
        raise PlanError(
            f"train.max_steps = {steps:,}: the run is at step {reached:,} already; expected more than {reached:,}",
            "train.max_steps",
        )
    if steps is None and (steps, asked.epochs) != (earlier.max_steps, earlier.epochs):
        begun = _epoch_of(saved[-1])
        if asked.epochs < begun:
            raise PlanError(
                f"train.epochs = {asked.epochs:,}: the run is in epoch {begun:,} already; expected {begun:,} or more",
                "train.epochs",
            )


def _epoch_of(checkpoint: Path) -> int:
    """The epoch in which a checkpoint was saved, counted from 1; 0 if that cannot be read."""
    try:
        return int(read_json(checkpoint / STATE)["progress"]["epoch"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0  # the trainer reports what is damaged
