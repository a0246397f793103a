"""`memconsole sample`: continue a prompt, or answer a record or a message, with a run's model."""

from __future__ import annotations

import subprocess
import sys

import click

from memconsole.cli.options import checkpoint_option
from memconsole.runs.record.directory import find_run
from memconsole.sanitize import clean


@click.command()
@click.argument("run", default="latest")
@click.option("--prompt", default="", help="What to continue; nothing starts a new document.")
@click.option(
    "--record",
    "fields",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the record to answer, for runs with data.template.",
)
@click.option("--message", metavar="TEXT", help="A user's message to answer, for runs on chats.")
@click.option("--tokens", type=click.IntRange(1, 4096), help="Most tokens; 64, of an answer 256.")
@click.option(
    "--temperature", type=click.FloatRange(0.0, 10.0), help="0.8; of an answer 0, the likeliest."
)
@click.option("--top-k", default=50, show_default=True, type=click.IntRange(0))
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.0, 1.0, min_open=True),
    help="Draw from the fewest tokens that are together this likely.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@checkpoint_option
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    prompt: str,
    fields: tuple[str, ...],
    message: str | None,
    tokens: int | None,
    temperature: float | None,
    top_k: int,
    top_p: float,
    seed: int,
    checkpoint: str,
) -> None:
    """Continue a prompt with the model of RUN, or answer a record or a message."""
    if sum(map(bool, (prompt, fields, message))) > 1:
        ctx.fail("give one of --prompt, --record and --message")
    found = find_run(run)
    options: dict[str, object] = {
        "--prompt": prompt,
        "--message": message,
        "--tokens": tokens,
        "--temperature": temperature,
        "--top-k": top_k,
        "--top-p": top_p,
        "--seed": seed,
        "--checkpoint": checkpoint,
    }
    arguments = [f"{name}={value}" for name, value in options.items() if value is not None]
    arguments += [f"--record={field}" for field in fields]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "memconsole_trainer.sample", str(found.path), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    click.echo(clean(done.stdout), nl=False)
    ctx.exit(done.returncode)
