"""Which checkpoint of a run is best: by the measure of its task, or by the validation loss."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from memconsole import typed_json
from memconsole.plan.tasks.judging import Score, best_of
from memconsole.runs.record.checkpoints.manifest import STATE, read_json

BEST = "best"
"""Name of the link to the best checkpoint."""


def best(committed: Iterable[Path]) -> Path | None:
    """The best of those that were saved right after an evaluation."""
    found = best_of((path, _scores(path)) for path in sorted(committed))
    return found[0] if found is not None else None


def mark(path: Path) -> None:
    """Point the link `best` beside a checkpoint to it, for people who look into the folder."""
    link, new = path.with_name(BEST), path.with_name(f".tmp-best-{os.getpid()}")
    if link.is_symlink() and os.readlink(link) == path.name:
        return
    with contextlib.suppress(OSError):  # a file system without links has no mark
        new.unlink(missing_ok=True)
        new.symlink_to(path.name)
        new.replace(link)


def _scores(path: Path) -> tuple[Score, ...]:
    """The scores of a checkpoint; older ones hold the loss alone."""
    try:
        state = read_json(path / STATE)
        if "scores" in state:
            return tuple(typed_json.convert(state["scores"], list[Score]))
        loss = state["validation_loss"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError):
        return ()
    return (Score(key="loss", value=float(loss)),) if isinstance(loss, int | float) else ()
