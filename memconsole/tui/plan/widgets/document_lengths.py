"""Describes the memory for rows that hold the data's p50, p99 and longest documents whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memconsole.tui.draw.lines import Line, Span, fit, left, right, rule, width_of
from memconsole.tui.draw.words import VERDICTS, verdict_mark
from memconsole.tui.views.plan_view import RowLengths
from memconsole.units import format_bytes

if TYPE_CHECKING:
    from memconsole.memory.answers.lengths import LengthPrice
    from memconsole.plan.data.lengths import Lengths

_NAMES = {"p50": "p50", "p99": "p99", "longest": "max"}
_UNKNOWN = (
    "documents' lengths are not known: memconsole plan --lengths measures them",
    "lengths unknown: memconsole plan --lengths",
    "memconsole plan --lengths",
)
"""The same in fewer and fewer words; the command is never cut."""


def brief(rows: RowLengths, width: int) -> Line:
    """One line: ``p50 312 ~1.2 GiB ✓ · p99 2,011 ~2.3 GiB ✗ · max 9,120 too long``.

    If that is too wide it drops p50, then the amounts, then all but the longest.
    """
    lengths = rows.lengths
    if lengths is None:
        return [Span(_unknown(width), "dim")]
    if lengths.kind == "rows":
        return [Span(fit(f" {_of_file(lengths)}", width), "dim")]
    prices = rows.prices
    choices = [_listed(prices), _listed(prices[1:])]
    choices += [_listed(prices, amounts=False), _listed(prices[2:], amounts=False)]
    return next((line for line in choices if width_of(line) <= width), [])


def _unknown(width: int) -> str:
    """That the lengths are not known, and the command that measures them."""
    return next((f" {words}" for words in _UNKNOWN if len(words) < width), f" {_UNKNOWN[-1]}")


def _listed(prices: Sequence[LengthPrice], *, amounts: bool = True) -> Line:
    line: Line = []
    for price in prices:
        mark, role = _verdict(price)
        line.append(Span(f" {'· ' if line else ''}{_NAMES[price.name]} {price.tokens:,}", "dim"))
        line.append(Span(f" {_amount(price)}{mark}" if amounts else mark or " ✗", role))
    return line


def whole(rows: RowLengths, width: int, height: int) -> list[Line]:
    """A rule, a line for each length, and how many documents were measured."""
    lines = [rule("rows that hold a document whole", width)]
    lengths = rows.lengths
    if lengths is None or lengths.kind == "rows":
        words = _unknown(width) if lengths is None else fit(f" {_of_file(lengths)}", width)
        lines.append([Span(words, "dim")])
        return lines[:height]
    for price in rows.prices:
        _, role = _verdict(price)
        lines.append(
            [
                Span(" " + left(price.name, 8), "dim"),
                Span(right(f"{price.tokens:,} tokens", 16)),
                Span(right(_amount(price), 14), "strong"),
                Span("  " + (verdict_mark(price.table.verdict) if price.table else ""), role),
            ]
        )
    which = "all" if lengths.exact else "a sample of"
    about = f" {which} {lengths.documents:,} documents; the table is for rows of the plan's length"
    lines.append([Span(fit(about, width), "dim")])
    return lines[:height]


def _of_file(lengths: Lengths) -> str:
    return f"every row of the file holds {lengths.longest:,} tokens"


def _amount(price: LengthPrice) -> str:
    table = price.table
    return "too long" if table is None else f"{table.device_tier}{format_bytes(table.device_bytes)}"


def _verdict(price: LengthPrice) -> tuple[str, str]:
    """A mark and its role."""
    if price.table is None:
        return "", "bad"
    mark, role = VERDICTS[price.table.verdict]
    return f" {mark}", role
