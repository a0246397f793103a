"""`memconsole resume`: continue a paused run, or restart an ended one from its last checkpoint."""

from __future__ import annotations

import click

from memconsole.runs.act import launch
from memconsole.runs.act.control import request_continue
from memconsole.runs.read.liveness import liveness
from memconsole.runs.record.directory import find_run
from memconsole.runs.record.identity import user_name
from memconsole.runs.record.requests import pause_asked


@click.command()
@click.argument("run", default="latest")
@click.option("--follow/--detach", "watch", default=False, help="Print its progress.")
@click.option("--changed-data", is_flag=True, help="Continue although the data have changed since.")
@click.option(
    "--from-scratch", is_flag=True, help="Begin again at step 0 if no intact checkpoint is left."
)
@click.pass_context
def command(
    ctx: click.Context, run: str, watch: bool, changed_data: bool, from_scratch: bool
) -> None:
    """Let a paused RUN go on; restart an ended RUN from its newest intact checkpoint."""
    found = find_run(run)
    if liveness(found).live and pause_asked(found):
        request_continue(found, f"{user_name()} (memconsole resume)")
        click.echo(f"{found.id}: goes on")
    else:
        attempt = launch.resume(found, changed_data=changed_data, from_scratch=from_scratch)
        click.echo(f"{found.id}: attempt {attempt}")
    if watch:
        from memconsole.cli.runs.train import follow

        ctx.exit(follow(found))
