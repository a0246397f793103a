"""`memconsole pause`: hold a run between two steps."""

from __future__ import annotations

import getpass

import click

from memconsole.runs.control import request_pause, wait_answer
from memconsole.runs.directory import RunError, find_run


@click.command()
@click.argument("run", default="latest")
def command(run: str) -> None:
    """Hold RUN after its present step, keeping its memory; memconsole resume lets it go on.

    To free the memory, stop it instead.
    """
    found = find_run(run)
    request = request_pause(found, f"{getpass.getuser()} (memconsole pause)")
    answer = wait_answer(found, request)
    if answer is None or not answer.accepted:
        raise RunError(f"run {found.id}: {answer.note if answer else 'its supervisor is silent'}")
    click.echo(f"{found.id}: pauses after its present step; memconsole resume {found.id} goes on")
