"""``memconsole_trainer.command predict RUN_DIR INPUT OUTPUT``: write what a run's model predicts for new
data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memconsole.plan.plan import PlanError, replace
from memconsole.plan.sections.data import OF_RATINGS
from memconsole.plan.tasks import task_of_model
from memconsole_trainer.new_files import new_file
from memconsole_trainer.predictions import items, windows
from memconsole_trainer.weights import trained

TOP = 10
"""Items for each user, if not said otherwise."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--top", type=int)
    for column in OF_RATINGS:
        parser.add_argument(_option(column), dest=column)
    parser.add_argument("--seen", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--checkpoint", default=trained.BEST_OR_LAST)
    parser.add_argument("--device")
    options = parser.parse_args()
    try:
        trained_model = trained.read(options.run, options.checkpoint, options.device)
        task = task_of_model(trained_model.model).name
        if task == "language":
            raise PlanError("the run learned language: use memconsole sample")
        asked = {key: name for key in OF_RATINGS if (name := getattr(options, key)) is not None}
        if task != "recommendation" and (options.top or options.seen or asked):
            raise PlanError(
                f"--top, --seen and {', '.join(map(_option, OF_RATINGS))} are for ratings, but the run learned {task}"
            )
        data = replace(trained_model.plan, asked).data
        check_output(options.input, options.output, options.overwrite)
        with new_file(options.output) as out:
            if task == "recommendation":
                top = options.top or TOP
                said = items.write(trained_model, options.input, data, out, top, options.seen, warn)
            else:
                said = windows.write(trained_model, options.input, out, warn)
    except (PlanError, ValueError, OSError) as error:
        print(f"memconsole: {_with_options(str(error))}", file=sys.stderr)
        return 2
    print(f"step {trained_model.checkpoint.step:,}{trained_model.note}: {said} in {options.output}")
    return 0


def _option(column: str) -> str:
    """The option for a setting of `OF_RATINGS`, such as ``--user-column``."""
    return "--" + column.removeprefix("data.").replace("_", "-")


def _with_options(words: str) -> str:
    """An error that names settings of columns, with the options of this command in their place."""
    for key in OF_RATINGS:
        words = words.replace(key, _option(key))
    return words


def warn(words: str) -> None:
    print(f"warning: {words}", file=sys.stderr)


def check_output(source: Path, output: Path, overwrite: bool) -> None:
    """Raise OSError unless `output` is the name of a new file, of an empty one, or with `overwrite` of any other
    than `source`."""
    if output.is_dir() or not output.parent.is_dir():
        raise FileNotFoundError(f"{output}: expected the name of a file in a folder that exists")
    if not output.exists():
        return
    if not output.is_file():
        raise FileExistsError(f"{output}: is not a regular file")
    if source.exists() and output.samefile(source):
        raise FileExistsError(f"{output}: is the input")
    if output.stat().st_size and not overwrite:
        raise FileExistsError(f"{output}: exists and is not empty; --overwrite replaces it")
