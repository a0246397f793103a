"""The interface of modules that make data: the request and the function that they implement."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from memconsole.plan.data.made import Size
from memconsole_trainer.data.make.bar import Bar


class Request(msgspec.Struct, frozen=True):
    """What to make. The same request makes the same data."""

    kind: str
    out: Path
    """Where to write: a file, or a directory that does not exist yet."""
    size: Size
    seed: int
    options: Mapping[str, Any]
    """Every option of the kind, by name."""


Facts = Mapping[str, str | int | float]
"""What was made, for people: a name and a value per line. A name that ends in `bytes` is shown in
bytes."""


class Make(Protocol):
    """The function `make` of `memconsole_trainer.data.make.<kind>`."""

    def __call__(self, request: Request, bar: Bar) -> Facts:
        """Write the data to `request.out` in constant memory, and call `bar.at` now and then.

        Raises `PlanError` for a size or an option that cannot be used.
        """
        ...


def maker(kind: str) -> Make:
    """The function that makes this kind."""
    found: Make = importlib.import_module(f"memconsole_trainer.data.make.{kind}").make
    return found
