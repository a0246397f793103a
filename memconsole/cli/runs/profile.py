"""`memconsole profile`: record a few steps of a running run."""

from __future__ import annotations

import time

import click

from memconsole.cli.completing import run_names
from memconsole.runs.act.control import request_profile, wait_accepted
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.read.life.newest import find_live
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventreader import EventReader
from memconsole.runs.record.processes.identity import user_name
from memconsole.sanitize import clean_line

POLL_SECONDS = 0.2


@click.command()
@click.argument("run", required=False, shell_complete=run_names)
@click.option("--steps", default=3, show_default=True, type=click.IntRange(1, 100))
@click.option("--wait/--no-wait", default=True, help="Wait until they are recorded.")
def command(run: str | None, steps: int, wait: bool) -> None:
    """Record the next steps of RUN, by default the newest live one: a trace of what it computes and its memory use.

    The run goes on; recorded steps are slower. The files go into RUN's folder.
    """
    found = find_live(run)
    request = request_profile(found, f"{user_name()} (memconsole profile)", steps)
    answer = wait_accepted(found, request)
    if not wait:
        click.echo(f"{found.id}: records its next steps into {found.path / 'profiles'}")
        return
    made = _recorded(found, answer.attempt, request)
    if not made.files:
        raise RunError(f"run {found.id}: the profile failed; memconsole logs {found.id} says why")
    for name in made.files:
        click.echo(clean_line(f"{made.folder}/{name}"))


def _recorded(run: RunDirectory, attempt: int, request: str) -> events.Profile:
    """Wait for the requested profile. Raises `RunError` if the run ends first."""
    reader = EventReader(run.attempt_path(attempt))
    while True:
        lives = liveness(run).live and run.newest_attempt() == attempt
        for event in reader.read():
            if isinstance(event, events.Profile) and event.request == request:
                return event
        if not lives:
            raise RunError(f"run {run.id}: attempt {attempt} ended before its steps were recorded")
        time.sleep(POLL_SECONDS)
