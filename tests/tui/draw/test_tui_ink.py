"""Lines, bars and the one way from data to the terminal."""

from __future__ import annotations

import math
import unicodedata
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from memconsole.devices.reading import Missing
from memconsole.tui.draw.bars import bar, sparkline, stacked
from memconsole.tui.draw.gauges import Gauge, gauge_lines
from memconsole.tui.draw.ink import Span, cleaned, fit, left, plain, right, rule, width_of, wrap
from memconsole.tui.widgets.choice_list import viewport
from memconsole.tui.widgets.painted import _changed_span

texts = st.text(max_size=80)
sizes = st.floats(min_value=0, max_value=1e15)


@given(texts, st.integers(0, 90))
def test_fitted_text_never_exceeds_its_cells(text: str, width: int) -> None:
    text = cleaned(text)
    assert cell_len(fit(text, width)) <= width
    assert cell_len(left(text, width)) == width
    assert cell_len(right(text, width)) == width


@given(st.text(max_size=300))
def test_cleaned_text_holds_no_control_character(text: str) -> None:
    for ascii_only in (False, True):
        out = cleaned(text, ascii_only)
        assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in out)
        out.encode("utf-8")
    assert cleaned(text, True).isascii()


def test_ascii_keeps_the_width_of_wide_characters() -> None:
    assert cleaned("日本", True) == "????"


@given(texts, st.integers(1, 60), st.integers(1, 5))
def test_wrapped_text_keeps_to_its_rows(text: str, width: int, most: int) -> None:
    lines = wrap(cleaned(text), width, most)
    assert len(lines) <= most
    assert all(cell_len(line) <= width for line in lines)


@given(st.integers(0, 100), st.text("abc ", max_size=40), st.text("xyz", max_size=40))
def test_a_rule_is_as_wide_as_asked(width: int, title: str, note: str) -> None:
    assert width_of(rule(title, width, note)) <= max(width, 2) + 1


@given(st.one_of(st.none(), sizes), sizes, st.integers(0, 80), st.one_of(st.none(), sizes))
def test_a_bar_has_exactly_its_width(
    value: float | None, scale: float, width: int, tick: float | None
) -> None:
    assert width_of(bar(value, scale, width, tick=tick)) == width


@given(
    st.lists(st.tuples(st.sampled_from("WGOA"), sizes, st.just("")), max_size=6), st.integers(0, 80)
)
def test_stacked_parts_have_exactly_their_width(
    parts: list[tuple[str, float, str]], width: int
) -> None:
    scale = sum(size for _, size, _ in parts)
    assert width_of(stacked(parts, scale, width, limit=scale / 2)) == width


def test_each_stacked_part_carries_its_letter() -> None:
    row = plain(stacked([("W", 50, "a"), ("G", 25, "b"), ("A", 25, "c")], 100, 40))
    assert row[0] == "W"
    assert (row[20], row[30]) == ("G", "A")


def test_the_predicted_peak_is_a_tick_on_the_same_scale() -> None:
    row = plain(bar(25.0, 100.0, 40, tick=75.0))
    assert row.index("┃") == 30
    assert row.startswith("█" * 10)


def test_a_gauge_without_a_reading_gives_its_reason() -> None:
    lines = gauge_lines(Gauge("VRAM", Missing("no driver"), Missing("no driver")), 40)
    assert plain(lines[0]).strip() == "VRAM n/a — no driver"
    assert "0" not in plain(lines[0])


def test_a_small_amount_of_a_large_device_says_where_its_bar_ends() -> None:
    lines = gauge_lines(Gauge("VRAM", 80, 24 * 2**30, predicted=100), 60)
    assert "80 B / 24.0 GiB" in plain(lines[0])
    assert plain(lines[1]).endswith("125 B")


@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 20), st.integers(-5, 60))
def test_the_viewport_shows_the_cursor(cursor: int, count: int, height: int, first: int) -> None:
    cursor = min(cursor, count - 1)
    top = viewport(cursor, count, height, max(0, first))
    if height:
        assert top <= cursor < top + height
        assert 0 <= top <= max(0, count - height)


rows = st.lists(st.tuples(st.text("ab日 ", min_size=1, max_size=5), st.sampled_from(["", "x"])))


@given(rows, rows)
def test_outside_the_changed_span_rows_are_equal(
    old: list[tuple[str, str]], new: list[tuple[str, str]]
) -> None:
    from memconsole.tui.widgets.painted import _cells

    start, end = _changed_span(old, new)
    a, b = list(_cells(old)), list(_cells(new))
    size = max(len(a), len(b))
    a += [(" ", "")] * (size - len(a))
    b += [(" ", "")] * (size - len(b))
    assert a[:start] == b[:start]
    assert a[end:] == b[end:]
    assert not (start < size and b[start][0] == "" and start < end)


def test_spans_are_plain_values() -> None:
    assert plain([Span("a"), Span("b", "good")]) == "ab"


def test_a_history_grows_by_its_last_cell_alone() -> None:
    series = [(float(s), 40.0 + s % 3) for s in range(0, 100, 2)]
    rows = [plain(sparkline(series[:n], 100.0, 80.0, 20)) for n in range(1, len(series) + 1)]
    for before, after in pairwise(rows):
        end = len(before.rstrip())
        assert after[: end - 1] == before[: end - 1]
    assert rows[-1] == "▄" * 20


def test_a_history_shows_the_highest_of_a_cell_and_marks_what_is_beyond_the_prediction() -> None:
    series = [(1.0, 10.0), (2.0, 79.0), (3.0, 20.0), (55.0, 81.0), (95.0, math.nan)]
    line = sparkline(series, 100.0, 80.0, 10)
    assert plain(line) == "█████▲    "
    assert [span.text for span in line if span.role == "warn"] == ["▲"]
    assert plain(sparkline([], 100.0, 80.0, 10)) == " " * 10


@given(st.lists(st.tuples(st.floats(), st.floats())), st.floats(), st.floats(), st.integers(-1, 9))
def test_a_history_has_its_width_whatever_the_numbers(
    series: list[tuple[float, float]], end: float, full: float, width: int
) -> None:
    assert len(plain(sparkline(series, end, full, width))) == max(0, width)


def test_a_history_has_a_sign_of_its_own_for_each_height_in_ascii() -> None:
    row = plain(sparkline([(float(n), n + 1.0) for n in range(8)], 8.0, 8.0, 8))
    drawn = cleaned(row + "▲", ascii_only=True)
    assert drawn.isascii()
    assert len(set(drawn)) == 9
