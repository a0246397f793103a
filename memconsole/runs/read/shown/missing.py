"""Counts the records that a damaged event log lacks, and names the figures they may have changed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from memconsole.runs.record import files
from memconsole.runs.record.log.eventreader import EventReader
from memconsole.runs.record.records import EXIT, FINAL

_LISTS = ("steps", "evaluations", "epochs", "memory.measured", "memory.by_phase")
"""Figures that only the records contain. The names are those of `report --json`."""
_TOLD_AT_THE_END = (
    "best_validation_loss",
    "final_train_loss",
    "total_minutes",
    "average_epoch_minutes",
)
"""Figures that the trainer repeats in its last record."""
MARK = "?"
"""Stands after a figure that may be wrong."""


def uncertain_figures(missing: int, ended: bool) -> tuple[str, ...]:
    """The figures that may be wrong, if records are missing. `ended`: whether the trainer's last record
    was read."""
    if not missing:
        return ()
    return _LISTS if ended else (*_LISTS, *_TOLD_AT_THE_END)


def marked(text: str, figure: str, uncertain: Collection[str]) -> str:
    """`text`, with a mark if its figure may be wrong."""
    return f"{text} {MARK}" if figure in uncertain else text


def missing_words(missing: int) -> str:
    """One phrase: how many records are missing, and what that means."""
    records = "1 record is" if missing == 1 else f"{missing:,} records are"
    return f"{records} missing or damaged in the event log: figures with {MARK} may be wrong"


class MissingCounts:
    """Counts over the attempts of a run, in the order in which they are read."""

    def __init__(self, damaged: int = 0, unseen: int = 0) -> None:
        self._damaged, self._unseen = damaged, unseen

    def counts(self, reader: EventReader | None) -> tuple[int, int]:
        """Lines that could not be read, and sequence numbers that were not seen, up to `reader`."""
        if reader is None:
            return self._damaged, self._unseen
        return (
            self._damaged + reader.damaged + reader.unknown,
            self._unseen + reader.missing,
        )

    def records(self, reader: EventReader | None) -> int:
        """How many records are missing. A damaged line usually leaves a gap in the numbers, so the
        larger count is taken."""
        torn = reader is not None and reader.torn and _has_ended(reader.directory)
        damaged, unseen = self.counts(reader)
        return max(damaged + torn, unseen)

    def leave(self, reader: EventReader | None) -> None:
        """The attempt of `reader` is read to its end."""
        self._damaged, self._unseen = self.counts(reader)
        self._damaged += reader is not None and reader.torn


def _has_ended(attempt: Path) -> bool:
    """Whether the trainer writes no more records."""
    return any(files.exists(attempt / name) for name in (FINAL, EXIT))
