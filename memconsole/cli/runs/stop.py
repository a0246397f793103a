"""`memconsole stop`: checkpoint a run and stop it."""

from __future__ import annotations

import time

import click

from memconsole.cli.asking import ask
from memconsole.cli.completing import run_names
from memconsole.runs.act.control import request
from memconsole.runs.act.launch import attend
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.newest import find_live
from memconsole.runs.read.shown.words import resume_command, state_word
from memconsole.runs.record.processes.identity import user_name
from memconsole.runs.record.states import LIVE

POLL_SECONDS = 0.2


@click.command()
@click.argument("run", required=False, shell_complete=run_names)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--kill", is_flag=True, help="Kill it: no step is finished, no checkpoint written.")
@click.option("--wait/--no-wait", default=True, help="Wait until it has stopped.")
def command(run: str | None, yes: bool, kill: bool, wait: bool) -> None:
    """Stop RUN, by default the newest live one: it finishes its step, writes a checkpoint, and can be resumed.

    The exit code is 0 also if RUN has ended already: nothing of it is left to stop.
    """
    found = find_live(run)
    follower = Follower(found)
    before = follower.status()
    ends = {*LIVE, "orphaned"} if kill else set(LIVE)
    if before.state not in ends:
        click.echo(f"{found.id} is not running: {state_word(before)}")
        return
    verb = "Kill" if kill else "Stop"
    if not yes:
        unsaved = f" It {before.unsaved}." if before.unsaved else ""
        ask(f"{verb} {found.id} ({before.name}) at step {before.step:,}?{unsaved}")
    who = f"{user_name()} (memconsole stop)"
    asked = request(found, "kill" if kill else "stop", who)
    told = kill
    while wait:
        now = follower.status()
        if now.state not in ends:
            more = f"; {resume_command(found.id, now.ended_by)}" if now.resumable else ""
            click.echo(f"{found.id}: {state_word(now)} at step {now.step:,}{more}")
            return
        if now.unsaved and not told:
            told = True
            click.echo(
                f"{found.id} {now.unsaved}. It stops once they are saved; "
                f"memconsole stop {found.id} --kill loses them"
            )
        attend(found)
        time.sleep(POLL_SECONDS)
    click.echo(f"{found.id}: {'asked to stop' if asked else 'cancelled'}")
