"""Decides what a run standardizes its windows with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from memconsole.plan.plan import Plan
from memconsole.plan.training.origin import checkpoint_of
from memconsole_trainer.data.windows.file import WindowFile
from memconsole_trainer.data.windows.measuring import measured
from memconsole_trainer.data.windows.split import WindowSplit
from memconsole_trainer.data.windows.standardization import (
    FINGERPRINT,
    Standardization,
    keep,
    kept,
    of_checkpoint,
    out_of_scale,
)
from memconsole_trainer.tasks.task import Teller


def standardization_of(
    plan: Plan,
    file: WindowFile,
    split: WindowSplit,
    directory: Path,
    known: Mapping[str, str],
    say: Teller,
) -> Standardization | None:
    """What the run standardizes with; None if it trains on the numbers as they are. A resumed run goes on as it began, and one that
    begins with the weights of another run does as that run did. Raises `DataError`."""
    choice = plan.data.standardize
    if known:
        return of_checkpoint(directory, known.get(FINGERPRINT))
    found = kept(directory)
    if found is not None or choice == "never":
        return found
    checkpoint = checkpoint_of(plan)
    if checkpoint is not None:  # "best" is a link to the checkpoint of a step
        found = kept(checkpoint.resolve().parents[1])
        if found is None and choice == "auto":
            return None
    if found is None:
        if choice == "auto" and file.says_normalized:
            return None
        statistics = measured(file, split, say.tick)
        if choice == "auto" and not out_of_scale(statistics):
            return None
        found = Standardization.of(statistics)
    keep(directory, found)
    return found
