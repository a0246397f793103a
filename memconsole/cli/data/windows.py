"""`memconsole data windows`: cut a table of numbers into windows to train a regressor on."""

from __future__ import annotations

from pathlib import Path

import click

from memconsole.cli.data.writing import absolute, check_place, write
from memconsole.plan.catalog.windows import MOST_WIDE, WINDOW_FILES
from memconsole.plan.plan import PlanError
from memconsole.plan.sections.section import MOST

MOST_LONG = 65_536
"""The most rows of a window."""


@click.command("windows")
@click.argument("table", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--inputs", required=True, metavar="NAMES", help="Columns of a window, divided by commas."
)
@click.option(
    "--outputs", default="", metavar="NAMES", help="Columns to predict; none: for predictions."
)
@click.option("--group", metavar="NAME", help="The column that says to which series a row belongs.")
@click.option(
    "--length",
    default=32,
    show_default=True,
    type=click.IntRange(1, MOST_LONG),
    help="Rows of a window.",
)
@click.option(
    "--stride",
    default=1,
    show_default=True,
    type=click.IntRange(1, MOST),
    help="Rows between the starts of two windows.",
)
@click.option(
    "--ahead",
    default=0,
    show_default=True,
    type=click.IntRange(0, MOST),
    help="The outputs are those of so many rows after a window's last one.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def windows_command(
    table: Path,
    out: Path,
    inputs: str,
    outputs: str,
    group: str | None,
    length: int,
    stride: int,
    ahead: int,
    force: bool,
    as_json: bool,
) -> None:
    """Cut the rows of TABLE, which are steps in time, into windows in the HDF5 file OUT.

    A regressor learns from them: memconsole train --set model.name=lqr --set data.source=OUT
    --set data.sequence_length=32. TABLE is a CSV, TSV, Parquet, JSON or JSON Lines file. Windows with a missing input are
    left out, and missing outputs do not count in the loss. With --group no window reaches over two series, and
    whole series are held out.
    """
    if out.suffix.lower() not in WINDOW_FILES:
        raise PlanError(
            f"{out}: windows are read from a file whose name ends with {' or '.join(WINDOW_FILES)}"
        )
    request = {
        "table": absolute(table),
        "out": absolute(out),
        "inputs": _names("--inputs", inputs),
        "outputs": _names("--outputs", outputs) if outputs else [],
        "group": group,
        "length": length,
        "stride": stride,
        "ahead": ahead,
    }
    check_place(out, force)
    write("memconsole_trainer.data.cutting", request, as_json)


def _names(option: str, given: str) -> list[str]:
    names = [name.strip() for name in given.split(",")]
    twice = next((name for name in names if names.count(name) > 1), None)
    if "" in names or twice is not None:
        what = "an empty name" if twice is None else f'"{twice}" twice'
        raise PlanError(
            f"{option} = {given}: holds {what}; expected names of columns, divided by commas"
        )
    if len(names) > MOST_WIDE:
        raise PlanError(f"{option}: holds {len(names):,} names; expected at most {MOST_WIDE:,}")
    return names
