"""The interface of a tracker, and the facts about the run that it gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Told:
    """What a tracker shows about a run besides its curves."""

    id: str
    """The run's id; `ID-2` after it began again at step 0, then `ID-3`."""
    name: str
    folder: Path
    """The run's directory."""
    settings: dict[str, Any]
    """The plan, as `section.key: value`, without secrets."""
    tags: tuple[str, ...]
    note: str
    offline: bool
    tracked: str
    """The tracker's own id of this run, from an earlier process; empty at first."""


@dataclass(frozen=True)
class Figures:
    """The figures of one event."""

    step: int
    """The optimizer step; of figures of an epoch the number of the epoch."""
    time_wall: float
    values: dict[str, float]


class Tracker(Protocol):
    """One run of a tracker. Every method may raise anything; the process tries again."""

    tracked: str
    """The tracker's own id of the run."""
    where: str
    """Where a user finds the run: an address or a folder."""

    def send(self, figures: list[Figures]) -> None:
        """Send figures, oldest first."""

    def finish(self, state: str) -> None:
        """Send waiting figures, and close the run; `state` is finished, stopped, killed or failed."""
