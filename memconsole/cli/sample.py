"""`memconsole sample`: continue a prompt with a run's model."""

from __future__ import annotations

import subprocess
import sys

import click

from memconsole.runs.record.directory import find_run
from memconsole.sanitize import clean


@click.command()
@click.argument("run", default="latest")
@click.option("--prompt", default="", help="What to continue; nothing starts a new document.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(1, 4096))
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(0.0, 10.0))
@click.option("--top-k", default=50, show_default=True, type=click.IntRange(0))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> None:
    """Continue a prompt with RUN's newest checkpoint."""
    found = find_run(run)
    options = {
        "--prompt": prompt,
        "--tokens": tokens,
        "--temperature": temperature,
        "--top-k": top_k,
        "--seed": seed,
    }
    arguments = [f"{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "memconsole_trainer.sample", str(found.path), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    click.echo(clean(done.stdout), nl=False)
    ctx.exit(done.returncode)
