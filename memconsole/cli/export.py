"""`memconsole export`: a run's weights as a Hugging Face directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from memconsole.runs.directory import find_run


@click.command()
@click.argument("run")
@click.argument("directory", type=click.Path(path_type=Path))
@click.pass_context
def command(ctx: click.Context, run: str, directory: Path) -> None:
    """Write RUN's newest checkpoint to DIRECTORY: config.json, safetensors and tokenizer.json."""
    found = find_run(run)
    argv = ["-P", "-m", "memconsole_trainer.export", str(found.path), str(directory)]
    ctx.exit(subprocess.run([sys.executable, *argv], stdin=subprocess.DEVNULL).returncode)
