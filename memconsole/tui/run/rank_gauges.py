"""The memory of all ranks of a watched run, as they are drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memconsole.devices.reading import Missing
from memconsole.runs.read.curves.curve import Curve
from memconsole.runs.read.shown.ranks import rank_word
from memconsole.runs.read.state.ranks import RankFacts, own_seconds, slowest
from memconsole.tui.draw.gauges import Gauge
from memconsole.tui.draw.lines import Line
from memconsole.tui.draw.ranks import RankGauge, rank_head, rank_lines, rank_title
from memconsole.tui.views.run_view import RunView


@dataclass(frozen=True)
class RankSection:
    """The ranks of a run as rows: the title, as text for a rule (`title`) or as a row (`head`), and the other rows."""

    title: str
    head: Line
    lines: list[Line]


def rank_section(view: RunView, first: Gauge, width: int) -> RankSection | None:
    """The ranks of a run that has several. `first` is the gauge of the first process's tensors."""
    run = view.snapshot
    if run is None or run.facts.rank_count == 1:
        return None
    ranks, word = rank_gauges(view, first), rank_word(run.facts)
    return RankSection(
        rank_title(ranks, width - 2, word),
        rank_head(ranks, width, word),
        rank_lines(ranks, slowest(run.facts.ranks), width, word),
    )


def rank_gauges(view: RunView, first: Gauge) -> list[RankGauge]:
    """A gauge for each rank, also for those that have reported nothing yet."""
    assert view.snapshot is not None
    facts = view.snapshot.facts
    by_rank = {rank.reading.rank: rank for rank in facts.ranks}
    own = own_seconds(facts.ranks)
    plain = replace(first, peak=None, history=Curve())
    nothing = Missing("no reading yet" if view.live else "left no reading")
    return [
        _gauge(by_rank[rank], plain, own.get(rank), live=view.live)
        if rank in by_rank
        else RankGauge(rank, replace(plain, used=nothing))
        for rank in range(facts.rank_count)
    ]


def _gauge(facts: RankFacts, plain: Gauge, own: float | None, *, live: bool) -> RankGauge:
    reading = facts.reading
    used = reading.allocated_bytes
    gauge = replace(
        plain,
        used=Missing("not reported here") if used is None else used,
        peak=reading.peak_bytes,
    )
    return RankGauge(reading.rank, gauge, own, reading.step if facts.silent and live else None)
