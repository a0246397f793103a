"""The columns of the table that a window file was cut from: `memconsole data windows` writes their names as attributes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memconsole_trainer.data.sources.documents import DataError

INPUTS, OUTPUTS = "inputs", "outputs"


class ColumnNames(NamedTuple):
    """The names of the inputs and of the outputs, in their order; empty if the file does not say."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def write_names(file: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Write the names to an open file."""
    file.attrs[INPUTS], file.attrs[OUTPUTS] = json.dumps(inputs), json.dumps(outputs)


def read_names(file: Any) -> ColumnNames:
    """The names in an open file."""
    return ColumnNames(_names(file.attrs.get(INPUTS)), _names(file.attrs.get(OUTPUTS)))


def _names(stored: Any) -> tuple[str, ...]:
    try:
        names = json.loads(stored)
    except (TypeError, ValueError):  # missing, or of another program
        return ()
    whole = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if whole else ()


def check_inputs(new: Path, names: ColumnNames, learned: Path) -> None:
    """Raise `DataError` if a model learned from the file `learned`, whose inputs have other names or another order. Without
    names in both files, or if `learned` is gone, nothing is known."""
    import h5py

    try:
        with h5py.File(learned) as file:
            known = read_names(file)
    except OSError:
        return
    if names.inputs and known.inputs and names.inputs != known.inputs:
        raise DataError(
            f"{new}: its inputs are {', '.join(names.inputs)}; the run learned from {', '.join(known.inputs)}, in this "
            "order: cut the table with these inputs"
        )
