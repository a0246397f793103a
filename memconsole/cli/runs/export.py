"""`memconsole export`: a run's weights as a directory that other programs load."""

from __future__ import annotations

from pathlib import Path

import click

from memconsole.cli.completing import run_names
from memconsole.cli.options import checkpoint_option
from memconsole.cli.runs.program import run_program
from memconsole.runs.record.run_store import find_run


@click.command()
@click.argument("run", shell_complete=run_names)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    default="huggingface",
    show_default=True,
    type=click.Choice(["huggingface", "peft", "bitnet"]),
    help="peft: LoRA adapters alone; bitnet: matrices in -1, 0 and 1 (b1.58), with the loss it costs.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the exported weights. Default: that of the weights the run started from; fp32 for adapters, recommenders and regressors.",
)
@checkpoint_option
@click.pass_context
def command(
    ctx: click.Context, run: str, directory: Path, form: str, dtype: str | None, checkpoint: str
) -> None:
    """Write a checkpoint of RUN to DIRECTORY, as transformers loads it: configuration, weights,
    tokenizer, chat template and what ends a text.

    Of a run that learned recommendation or regression, write weights, sizes, the ids of items or the
    constants of normalization, and model.py, which computes with them in plain torch.

    If the run keeps a moving average of the weights (train.ema_decay), the average is written.
    """
    found = find_run(run)
    argv = [str(directory)]
    argv += [] if form == "huggingface" else [form]
    argv += [] if dtype is None else [f"--dtype={dtype}"]
    argv.append(f"--checkpoint={checkpoint}")
    ctx.exit(run_program("export", found, argv))
