"""`memconsole attach`: watch a run in the console, or as plain lines without a terminal."""

from __future__ import annotations

import sys

import click

from memconsole.cli.completing import run_names
from memconsole.runs.record.run_store import find_run


@click.command()
@click.argument("run", default="latest", shell_complete=run_names)
@click.option("--readonly", is_flag=True, help="Watch only: no stop, no resume.")
@click.option("--ascii", is_flag=True, help="Draw with ASCII only.")
@click.option("--slow-link/--fast-link", default=None, help="Fewer bytes; automatic over SSH.")
@click.pass_context
def command(
    ctx: click.Context, run: str, readonly: bool, ascii: bool, slow_link: bool | None
) -> None:
    """Watch RUN: an id, its beginning, a name, or "latest". Leaving, also by Ctrl-C, does not stop the run."""
    found = find_run(run)
    if sys.stdin.isatty() and sys.stdout.isatty():
        from memconsole.tui.app.console import run_console

        ctx.exit(run_console(attach=found.id, readonly=readonly, ascii=ascii, slow_link=slow_link))
    from memconsole.cli.runs.train import Interrupts, follow

    ctx.exit(follow(found, Interrupts()))
