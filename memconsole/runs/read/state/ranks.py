"""The readings of a run's ranks, and the rank that the others wait for.

A rank is one process of several, or one device of a process that has several.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from memconsole.runs.record.log.events import RankReading, Ranks
from memconsole.sanitize import clean_line

CLEARLY = 0.1
"""A rank is slow if the others wait for it for at least this share of a step."""
MOST_RANKS = 4096
"""A record with more ranks was not written by this program."""
SILENT = 3
"""A reading that was repeated this often without a change counts as old."""


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The newest reading of a rank, with the peaks of all attempts."""

    reading: RankReading
    repeated: int = 0
    """How often the same reading has been repeated since."""

    @property
    def silent(self) -> bool:
        """Whether it reports nothing new while the others do."""
        return self.repeated >= SILENT


class Slowest(NamedTuple):
    """The rank that the others wait for."""

    rank: int
    share: float
    """The share of a step for which the others wait: the median over them."""

    @property
    def clearly(self) -> bool:
        """Whether it is worth a warning."""
        return self.share >= CLEARLY

    @property
    def words(self) -> str:
        """The share in per cent."""
        return f"{100 * self.share:.0f} %"


def readings_of(record: Ranks, count: int) -> tuple[RankReading, ...] | None:
    """The readings of a record of `count` ranks, with printable names and finite times; None if it has
    impossible numbers, as a damaged or forged one can."""
    for one in record.ranks:
        counts = [n for n in msgspec.structs.astuple(one) if isinstance(n, int)]
        if one.rank >= count or not all(
            0 <= n < 1 << 63 for n in (*counts, *one.peaks_by_phase.values())
        ):
            return None
    return tuple(_cleaned(one) for one in record.ranks)


def _cleaned(reading: RankReading) -> RankReading:
    return msgspec.structs.replace(
        reading,
        peaks_by_phase={clean_line(k, 40): v for k, v in reading.peaks_by_phase.items()},
        step_seconds=_positive(reading.step_seconds),
        exchange_seconds=_positive(reading.exchange_seconds),
    )


def _positive(seconds: float | None) -> float | None:
    return seconds if seconds is not None and 0 <= seconds < 1e9 else None


def merged(known: Sequence[RankFacts], told: Sequence[RankReading]) -> tuple[RankFacts, ...]:
    """The facts after more readings."""
    found = {one.reading.rank: one for one in known}
    for reading in told:
        before = found.get(reading.rank)
        found[reading.rank] = (
            RankFacts(reading=reading) if before is None else _next(before, reading)
        )
    return tuple(found[rank] for rank in sorted(found))


def _next(before: RankFacts, reading: RankReading) -> RankFacts:
    old = before.reading
    peaks = dict(old.peaks_by_phase)
    for phase, peak in reading.peaks_by_phase.items():
        peaks[phase] = max(peak, peaks.get(phase, 0))
    new = msgspec.structs.replace(
        reading,
        peak_bytes=highest(old.peak_bytes, reading.peak_bytes),
        peak_device_bytes=highest(old.peak_device_bytes, reading.peak_device_bytes),
        peak_reserved_bytes=highest(old.peak_reserved_bytes, reading.peak_reserved_bytes),
        peak_host_bytes=highest(old.peak_host_bytes, reading.peak_host_bytes),
        peaks_by_phase=peaks,
    )
    same = new == old
    return RankFacts(reading=new, repeated=before.repeated + 1 if same else 0)


def highest(*values: int | None) -> int | None:
    """The largest of the values that are known."""
    return max((value for value in values if value is not None), default=None)


def slowest(ranks: Sequence[RankFacts]) -> Slowest | None:
    """The rank that waits least in exchanges, which is the one that the others wait for. None if fewer
    than two ranks report how long they wait."""
    told = {
        one.reading.rank: one.reading.exchange_seconds
        for one in ranks
        if one.reading.exchange_seconds is not None and not one.silent
    }
    steps = [one.reading.step_seconds for one in ranks if one.reading.step_seconds]
    if len(told) < 2 or not steps:
        return None
    rank = min(told, key=lambda r: (told[r], r))
    others = statistics.median(seconds for r, seconds in told.items() if r != rank)
    return Slowest(rank, min(1.0, max(0.0, others - told[rank]) / statistics.median(steps)))


def own_seconds(ranks: Sequence[RankFacts]) -> dict[int, float]:
    """For each rank that reports its wait: the seconds of a step without the wait for the slowest rank."""
    told = [one.reading for one in ranks if one.reading.exchange_seconds is not None]
    least = min((reading.exchange_seconds or 0.0 for reading in told), default=0.0)
    return {
        reading.rank: max(0.0, reading.step_seconds - (reading.exchange_seconds or 0.0) + least)
        for reading in told
        if reading.step_seconds is not None
    }
