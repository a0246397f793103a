"""Reads the events of all attempts of a run as one history, and keeps the state after them."""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.runs.read.life.ladder import resized_after
from memconsole.runs.read.shown.missing import MissingCounts
from memconsole.runs.read.state.reduce import RunState, begin_attempt, forget_memory, reduce
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventreader import EventReader

READ_BYTES = 1 << 20
"""Log bytes read at a time. This bounds the memory needed to read a long run."""


class History:
    """The state of a run after the events read so far."""

    def __init__(self, run: RunDirectory, state: RunState) -> None:
        self.run = run
        self.state = state
        self.counts = MissingCounts()
        self.reader: EventReader | None = None
        """Of the newest attempt; None before the first one."""
        self.pieces = 0
        """How many pieces of at most `READ_BYTES` were read."""

        self.resized_at = 0
        """The step after which the sizes of the newest attempt began, of those attempts that were read."""

    @property
    def missing(self) -> int:
        """How many records could not be read, are not there, or had impossible values."""
        return self.counts.records(self.reader) + self.state.odd

    def new(self) -> Iterator[events.Record]:
        """Every new record of this attempt and of later attempts, each after it was added to `state`."""
        # List the attempts first: once a later one exists, earlier ones get no more records.
        later = [n for n in self.run.attempt_numbers() if n > self.state.attempt]
        yield from self._drain()
        for number in later:
            self.counts.leave(self.reader)
            self.reader = EventReader(self.run.attempt_path(number))
            begin_attempt(self.state, number)
            if number - 1 in resized_after(self.run):
                forget_memory(self.state)
                self.resized_at = self.state.step
            yield from self._drain()

    def _drain(self) -> Iterator[events.Record]:
        reader, before = self.reader, None
        while reader is not None and reader.position != before:
            before = reader.position
            for record in reader.read(READ_BYTES):
                if isinstance(record, events.Started):  # steps after it are taken again
                    self.resized_at = min(self.resized_at, record.resumed_step)
                reduce(self.state, record)
                yield record
            self.pieces += reader.position != before
