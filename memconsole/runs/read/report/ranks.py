"""What a report says of each rank: one process of several, or one device of a process that has several."""

from __future__ import annotations

import msgspec

from memconsole.runs.read.state.facts import FactsSoFar
from memconsole.runs.read.state.ranks import RankFacts, slowest


class RankLine(msgspec.Struct, frozen=True, kw_only=True):
    """The peaks of a rank, and the time of its newest steps. None: not reported."""

    rank: int
    peak_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    host_bytes: int | None
    by_phase: dict[str, int]
    step_seconds: float | None
    exchange_seconds: float | None
    """Seconds of a step in exchanges with the others, the wait for them included."""


class SlowestLine(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that the others wait for, and for what share of a step."""

    rank: int
    share: float


def rank_lines(state: FactsSoFar) -> tuple[RankLine, ...]:
    """Every rank that has reported something."""
    on_cpu = state.started is not None and state.started.device_kind == "cpu"
    return tuple(_line(one, on_cpu) for one in state.ranks)


def _line(one: RankFacts, on_cpu: bool) -> RankLine:
    reading = one.reading
    return RankLine(
        rank=reading.rank,
        peak_bytes=reading.peak_bytes,
        reserved_bytes=None if on_cpu else reading.peak_reserved_bytes,
        device_bytes=reading.peak_bytes if on_cpu else reading.peak_device_bytes,
        host_bytes=reading.peak_host_bytes,
        by_phase=reading.peaks_by_phase,
        step_seconds=reading.step_seconds,
        exchange_seconds=reading.exchange_seconds,
    )


def slowest_line(state: FactsSoFar) -> SlowestLine | None:
    """The slowest rank; None if fewer than two report how long they wait."""
    found = slowest(state.ranks)
    return None if found is None else SlowestLine(rank=found.rank, share=found.share)
