"""`memconsole resume`: let a paused run go on, or continue one from its last checkpoint."""

from __future__ import annotations

import click

from memconsole.runs.control import pause_asked, request_continue
from memconsole.runs.directory import find_run
from memconsole.runs.identity import user_name
from memconsole.runs.launch import local
from memconsole.runs.liveness import liveness


@click.command()
@click.argument("run", default="latest")
@click.option("--follow/--detach", "watch", default=False, help="Print its progress.")
@click.pass_context
def command(ctx: click.Context, run: str, watch: bool) -> None:
    """Let a paused RUN go on; start an ended one anew from its newest intact checkpoint."""
    found = find_run(run)
    if liveness(found).live and pause_asked(found):
        request_continue(found, f"{user_name()} (memconsole resume)")
        click.echo(f"{found.id}: goes on")
    else:
        attempt = local.resume(found)
        click.echo(f"{found.id}: attempt {attempt}")
    if watch:
        from memconsole.cli.train import follow

        ctx.exit(follow(found))
