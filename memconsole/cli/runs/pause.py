"""`memconsole pause`: hold a run between two steps."""

from __future__ import annotations

import click

from memconsole.cli.completing import run_names
from memconsole.runs.act.control import request, wait_accepted
from memconsole.runs.read.life.newest import find_live
from memconsole.runs.record.processes.identity import user_name


@click.command()
@click.argument("run", required=False, shell_complete=run_names)
def command(run: str | None) -> None:
    """Hold RUN, by default the newest live one, after its present step, keeping its memory; memconsole resume lets it
    go on.

    To free the memory, stop it instead.
    """
    found = find_live(run)
    wait_accepted(found, request(found, "pause", f"{user_name()} (memconsole pause)"))
    click.echo(f"{found.id}: pauses after its present step; memconsole resume {found.id} goes on")
