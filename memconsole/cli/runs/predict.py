"""`memconsole predict`: what a run's model predicts for new data."""

from __future__ import annotations

from pathlib import Path

import click

from memconsole.cli.completing import run_names
from memconsole.cli.options import checkpoint_option, device_option
from memconsole.cli.runs.program import run_program
from memconsole.runs.record.run_store import find_run


@click.command()
@click.argument("run", shell_complete=run_names)
@click.argument("input", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--top", type=click.IntRange(1), metavar="N", help="Items for each user. Default: 10."
)
@click.option("--seen", is_flag=True, help="Also recommend items that the user already has.")
@click.option("--user-column", metavar="NAME", help="Column of users, if not as in the run.")
@click.option("--item-column", metavar="NAME", help="Column of items, if not as in the run.")
@click.option("--time-column", metavar="NAME", help="Column of times, if not as in the run.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it exists.")
@checkpoint_option
@device_option
@click.pass_context
def command(
    ctx: click.Context,
    run: str,
    input: Path,
    output: Path,
    top: int | None,
    seen: bool,
    user_column: str | None,
    item_column: str | None,
    time_column: str | None,
    overwrite: bool,
    checkpoint: str,
    device: str | None,
) -> None:
    """Write what the model of RUN predicts for INPUT to OUTPUT.

    Of a run that learned recommendation, INPUT is a file of ratings, and OUTPUT a CSV file with the items
    that follow each user's last ones: user, rank, item, score.

    Of a run that learned regression, INPUT is an HDF5 file with input_sequences, and OUTPUT an HDF5
    file with outputs and normalized_outputs.
    """
    found = find_run(run)
    argv = [str(input), str(output)]
    named = {
        "top": top, "user-column": user_column, "item-column": item_column, "time-column": time_column,
        "device": device,
    }  # fmt: skip
    argv += [f"--{name}={value}" for name, value in named.items() if value is not None]
    argv += [f"--{name}" for name, given in (("seen", seen), ("overwrite", overwrite)) if given]
    argv.append(f"--checkpoint={checkpoint}")
    ctx.exit(run_program("predict", found, argv))
