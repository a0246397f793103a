"""`memconsole resume`: continue a run from its last checkpoint."""

from __future__ import annotations

import click

from memconsole.runs.directory import find_run
from memconsole.runs.launch import local


@click.command()
@click.argument("run", default="latest")
@click.option("--follow/--detach", "watch", default=False, help="Print its progress.")
@click.pass_context
def command(ctx: click.Context, run: str, watch: bool) -> None:
    """Continue RUN in a new attempt, from its newest intact checkpoint."""
    found = find_run(run)
    attempt = local.resume(found)
    click.echo(f"{found.id}: attempt {attempt}")
    if watch:
        from memconsole.cli.train import follow

        ctx.exit(follow(found))
