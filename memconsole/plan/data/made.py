"""The kinds of data that `memconsole data make` writes: names, sizes and options.

A kind is one row of `KINDS` and one module with a function `make`,
`memconsole_trainer.data.make.<name>`. The console prints the help from these rows and starts the
module in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from memconsole.plan.errors import quote
from memconsole.plan.plan import PlanError, nearest
from memconsole.units import parse_bytes

_COUNTS = {"k": 10**3, "m": 10**6, "g": 10**9}


class Option(msgspec.Struct, frozen=True):
    """One setting of a kind, `--set NAME=VALUE`. A value has the type of the default."""

    name: str
    default: int | float | str
    help: str


class Kind(msgspec.Struct, frozen=True):
    """One kind of data."""

    name: str
    help: str
    """What it is, in one clause."""
    units: str
    """What a size counts, in the plural."""
    options: tuple[Option, ...] = ()
    suffixes: tuple[str, ...] = ()
    """How the file's name ends, by which readers know its format; empty if any name will do."""


class Size(msgspec.Struct, frozen=True):
    """How much to make: a number of units, or about this many bytes. One of them is None."""

    count: int | None
    size_bytes: int | None


KINDS: tuple[Kind, ...] = (
    Kind(
        "equipment",
        "records of machines: symptom, codes, cause and solution (JSONL)",
        "records",
        suffixes=(".jsonl", ".ndjson"),
    ),
    Kind(
        "lqr",
        "HDF5 windows of optimally controlled linear systems, to train the model lqr",
        "windows",
        (
            Option("families", "", "families to write, with commas between; all if empty"),
            Option("variants", 50, "systems of each family, with parameters of their own"),
            Option("uncertainty", 0.2, "how far parameters vary, as a share"),
            Option("noise", 0.01, "process noise of each step, as a share of the states' range"),
            Option("steps", 242, "steps of a trajectory"),
            Option("stride", 21, "steps from one window of a trajectory to the next"),
            Option("compression", "lzf", "none, lzf or gzip"),
        ),
        (".h5", ".hdf5"),
    ),
    Kind(
        "preferences",
        "questions about machines with an answer to learn, and a preferred and a rejected one (JSONL), to try DPO or ORPO",
        "pairs",
        suffixes=(".jsonl", ".ndjson"),
    ),
    Kind(
        "ratings",
        "users and the items they met, with titles and genres, in MovieLens' layout: a folder with "
        "ratings.dat and movies.dat",
        "ratings",
        (
            Option("items", 1000, "items in all"),
            Option("genres", 20, "genres, which are clusters of items"),
            Option("history", 60, "mean number of ratings per user"),
        ),
    ),
    Kind(
        "text",
        "short stories as plain text, one per paragraph, to train the model stories",
        "bytes",
    ),
)


def kind(name: str) -> Kind:
    """The kind of this name. Raises `PlanError`."""
    for found in KINDS:
        if found.name == name:
            return found
    names = [k.name for k in KINDS]
    raise PlanError(f"data make {quote(name)}: expected {', '.join(names)}{nearest(name, names)}")


def parse_size(text: str) -> Size:
    """``100000``, ``100k``, ``1.5M`` and ``1g`` count units; ``2GB`` and ``512MiB`` are bytes.

    Raises `PlanError`.
    """
    word = text.strip().lower().replace("_", "").replace(",", "")
    try:
        if word.endswith("b"):
            size = Size(None, parse_bytes(word))
        elif word[-1:] in _COUNTS:
            size = Size(round(float(word[:-1]) * _COUNTS[word[-1]]), None)
        else:
            size = Size(int(word), None)
    except (ValueError, OverflowError):
        size = Size(None, None)
    if (size.count or size.size_bytes or 0) <= 0:
        raise PlanError(
            f"--size {quote(text)}: expected a number of units such as 100000, 100k, 1.5M or 1g, "
            "or bytes such as 512MiB or 2GB"
        )
    return size


def parse_options(kind: Kind, assignments: Iterable[str]) -> dict[str, Any]:
    """All options of the kind, with what ``name=value`` changes. Raises `PlanError`."""
    options = {option.name: option for option in kind.options}
    values: dict[str, Any] = {name: option.default for name, option in options.items()}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in options:
            known = ", ".join(options) or "no options"
            raise PlanError(
                f"--set {quote(assignment)}: data make {kind.name} has {known}{nearest(name, options)}"
            )
        expected = type(options[name].default)
        try:
            values[name] = expected(text)
        except ValueError:
            raise PlanError(
                f"--set {quote(assignment)}: expected a value like {options[name].default}"
            ) from None
    return values
