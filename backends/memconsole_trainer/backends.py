"""Finds an installed backend by its name."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from memconsole.extras import to_install
from memconsole.plan.plan import PlanError
from memconsole_trainer.engine import EngineFactory

MEMBER = "MEMCONSOLE_MEMBER"
"""Environment variable that is set in a process started to train together with others."""
Launch = Callable[[int, Sequence[str], Path, Path], int]
"""Runs `python ARGUMENTS` in the given number of processes; see `launch` in a backend's `launching.py`."""


def rank() -> int | None:
    """This process's number among those that train together; None if it was not started so."""
    return int(os.environ["RANK"]) if os.environ.get(MEMBER) else None


def launcher(backend: str) -> Launch | None:
    """Starts several processes of a run; None for a backend that trains in one.

    Raises `PlanError` as `engine_factory`.
    """
    name = f"{_entry(backend).module.rpartition('.')[0]}.launching"
    if importlib.util.find_spec(name) is None:
        return None
    found: Launch = importlib.import_module(name).launch
    return found


def _entry(backend: str) -> EntryPoint:
    found = [e for e in entry_points(group="memconsole.backends") if e.name == backend]
    if not found:
        raise PlanError(f'backend = "{backend}": not installed', "backend")
    return found[0]


def engine_factory(backend: str) -> EngineFactory:
    """Return the backend called `backend`. Raises `PlanError` when it cannot be imported."""
    entry = _entry(backend)
    try:
        with _objects_that_stay(entry.module):
            factory: EngineFactory = entry.load()
    except ModuleNotFoundError as error:
        raise PlanError(
            f'backend = "{backend}": {error.name} is not installed; {to_install(backend)}',
            "backend",
        ) from error
    return factory


@contextmanager
def _objects_that_stay(module: str) -> Iterator[None]:
    """A context for the first import of a framework. Its objects stay alive, so the garbage collector is told to skip
    them, now and later."""
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
