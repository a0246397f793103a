"""Pure functions that draw the memory of all ranks of a run: a bar for each, or a strip of many.

All have one scale, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memconsole.devices.reading import Missing
from memconsole.runs.read.state.ranks import Slowest
from memconsole.tui.draw.bars import EMPTY, bar, level
from memconsole.tui.draw.gauges import Gauge, peak_line
from memconsole.tui.draw.lines import Line, Span, fit, right, width_of
from memconsole.tui.draw.words import step_word
from memconsole.units import format_bytes

MOST_BARS = 8
"""More ranks are drawn as a strip."""
_GROUP = 8
"""Cells of a strip between two gaps."""
_AMOUNT = 8
_WIDE = 44
"""From this width on, a bar is followed by the time that its rank computes."""
_SLOW = "▲"


@dataclass(frozen=True)
class RankGauge:
    """One rank: its memory, and the seconds of a step in which it does not wait for the slowest one."""

    rank: int
    gauge: Gauge
    own_seconds: float | None = None
    silent_since: int | None = None
    """The step of the rank's newest reading, if the rank has stopped reporting."""


def scale_of(ranks: Sequence[RankGauge]) -> float:
    """Where all bars end."""
    return max((one.gauge.scale for one in ranks), default=0.0)


def rank_title(ranks: Sequence[RankGauge], width: int, word: str = "rank") -> str:
    """``VRAM tensors of 8 ranks, to 24.0 GiB``; without the word tensors if that is too wide."""
    label = ranks[0].gauge.label if ranks else ""
    about = f" of {len(ranks)} {word}s, to {format_bytes(scale_of(ranks))}"
    whole = label + about
    return whole if len(whole) <= width else label.removesuffix(" tensors") + about


def rank_head(ranks: Sequence[RankGauge], width: int, word: str = "rank") -> Line:
    """The title as a row of its own, with the heading of the last column."""
    timed = len(ranks) <= MOST_BARS and any(one.own_seconds is not None for one in ranks)
    column = " computes" if timed and width >= _WIDE else ""
    room = width - 1 - len(column)
    line: Line = [Span(" " + fit(rank_title(ranks, room, word), room), "strong")]
    if column:
        line.append(Span(right(column, width - width_of(line)), "dim"))
    return line


def rank_lines(
    ranks: Sequence[RankGauge], slow: Slowest | None, width: int, word: str = "rank"
) -> list[Line]:
    """The ranks, which are in order, then the fullest one beside the prediction, and the slowest one."""
    scale = scale_of(ranks)
    lines: list[Line] = []
    if len(ranks) <= MOST_BARS:
        lines += [_bar_line(one, scale, slow, width, word) for one in ranks]
    else:
        lines += _strip_lines(ranks, scale, width)
    reporting = [one for one in ranks if isinstance(one.gauge.used, int)]
    if reporting:
        lines += _fullest_lines(reporting, width, word, name_lowest=len(ranks) > MOST_BARS)
    if slow is not None:
        lines.append(slow_line(slow, width, word))
    return lines


def _bar_line(ranked: RankGauge, scale: float, slow: Slowest | None, width: int, word: str) -> Line:
    """``rank 3 ▕████▒▒┃··▏ 12.3 GiB   874 ms``; ▲ marks a rank that the others wait for."""
    is_slow = slow is not None and slow.clearly and slow.rank == ranked.rank
    name = f"{word} {ranked.rank}" if width >= 30 else str(ranked.rank)
    head: Line = [Span(_SLOW if is_slow else " ", "warn"), Span(name, "strong")]
    gauge = ranked.gauge
    if isinstance(gauge.used, Missing):
        return [*head, Span(fit(f" n/a — {gauge.used.reason}", width - width_of(head)), "dim")]
    tail: Line = [Span(" " + right(format_bytes(gauge.used), _AMOUNT))]
    if ranked.silent_since is not None:
        tail.append(Span(f" at step {ranked.silent_since:,}", "warn"))
    elif width >= _WIDE and ranked.own_seconds is not None:
        tail.append(
            Span(" " + right(step_word(ranked.own_seconds), _AMOUNT), "warn" if is_slow else "dim")
        )
    length = max(4, width - width_of(head) - width_of(tail) - 3)
    row = bar(
        float(gauge.used),
        scale,
        length,
        tick=None if gauge.predicted is None else float(gauge.predicted),
        reached=None if gauge.peak is None else float(gauge.peak),
        role="dim" if ranked.silent_since is not None else gauge.level[0],
    )
    return [*head, Span(" ▕", "dim"), *row, Span("▏", "dim"), *tail]


def _strip_lines(ranks: Sequence[RankGauge], scale: float, width: int) -> list[Line]:
    """A cell for each rank, as high as the rank's peak memory, with a gap after every eight cells."""
    number = len(str(ranks[-1].rank))
    groups = max(1, (width - number - 2 + 1) // (_GROUP + 1))
    while groups & (groups - 1):  # rows begin at round numbers
        groups -= 1
    each = groups * _GROUP
    lines: list[Line] = []
    for first in range(0, len(ranks), each):
        line: Line = [Span(f" {right(str(ranks[first].rank), number)}", "dim")]
        for n, one in enumerate(ranks[first : first + each]):
            if n % _GROUP == 0:
                line.append(Span(" "))
            known = isinstance(one.gauge.used, int)
            cell = level(float(one.gauge.highest), scale) if known else EMPTY
            old = one.silent_since is not None or not known
            line.append(Span(cell, "dim" if old else one.gauge.level[0]))
        lines.append(line)
    return lines


def _fullest_lines(
    reporting: Sequence[RankGauge], width: int, word: str, *, name_lowest: bool
) -> list[Line]:
    """The highest peak with its rank, and the prediction; if there are many ranks, also the lowest peak."""
    fullest = max(reporting, key=lambda one: (one.gauge.highest, -one.rank))
    lines = [peak_line(fullest.gauge, width, f"{word} {fullest.rank}")]
    if name_lowest:
        least = min(reporting, key=lambda one: (one.gauge.highest, one.rank))
        words = f" lowest peak {format_bytes(least.gauge.highest)} ({word} {least.rank})"
        lines.append([Span(fit(words, width), "dim")])
    return lines


def slow_line(slow: Slowest, width: int, word: str) -> Line:
    """The rank that the others wait for, and for how much of a step."""
    mark, role = (_SLOW, "warn") if slow.clearly else (" ", "dim")
    words = f"{mark}slowest {word} {slow.rank}: others wait {slow.words}"
    return [Span(fit(words, width), role)]
