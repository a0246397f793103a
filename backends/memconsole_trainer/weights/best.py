"""Which checkpoint of a run is best: that with the lowest validation loss."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from memconsole.runs.record.manifest import STATE, read_json

BEST = "best"
"""Name of the link to the best checkpoint."""


def best(committed: Iterable[Path]) -> Path | None:
    """The one with the lowest validation loss, of those that were saved right after an
    evaluation."""
    scored = [(loss, path) for path in committed if (loss := _validation_loss(path)) is not None]
    return min(scored)[1] if scored else None


def mark(path: Path) -> None:
    """Point the link `best` beside a checkpoint to it, for people who look into the folder."""
    link, new = path.with_name(BEST), path.with_name(f".tmp-best-{os.getpid()}")
    if link.is_symlink() and os.readlink(link) == path.name:
        return
    with contextlib.suppress(OSError):  # a file system without links has no mark
        new.unlink(missing_ok=True)
        new.symlink_to(path.name)
        new.replace(link)


def _validation_loss(path: Path) -> float | None:
    try:
        loss = read_json(path / STATE)["validation_loss"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return float(loss) if isinstance(loss, int | float) else None
