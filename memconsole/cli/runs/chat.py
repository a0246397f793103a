"""`memconsole chat`: a conversation with a run's model."""

from __future__ import annotations

import subprocess
import sys

import click

from memconsole.cli.completing import run_names
from memconsole.cli.options import checkpoint_option
from memconsole.cli.runs.sample import sampling_options
from memconsole.runs.record.directory import find_run


@click.command()
@click.argument("run", default="latest", shell_complete=run_names)
@click.option("--system", metavar="TEXT", help="A system message before the first one.")
@sampling_options
@checkpoint_option
@click.pass_context
def command(ctx: click.Context, /, run: str, system: str | None, **options: object) -> None:
    """Talk with the model of RUN, which was trained on chats. Each line is a message."""
    found = find_run(run)
    named = {"system": system, **options}
    arguments = [
        f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value is not None
    ]
    argv = [sys.executable, "-P", "-m", "memconsole_trainer.chat", str(found.path), *arguments]
    ctx.exit(subprocess.run(argv, check=False).returncode)
