"""Lines, bars and the one way from data to the terminal."""

from __future__ import annotations

import math
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from memconsole.devices.reading import Missing
from memconsole.runs.read.curves.curve import Curve
from memconsole.tui.draw.bars import area, bar, stacked
from memconsole.tui.draw.gauges import (
    Gauge,
    gauge_lines,
    history_lines,
    peak_line,
    round_bytes,
    whole_line,
)
from memconsole.tui.draw.lines import Span, cleaned, fit, left, plain, right, rule, width_of, wrap
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


def test_a_small_amount_of_a_large_device_has_a_scale_of_its_own() -> None:
    small = Gauge("VRAM", 60 << 20, 24 << 30, peak=70 << 20, predicted=72 << 20)
    head, row = gauge_lines(small, 60)
    assert "60.0 MiB" in plain(head)
    assert "0.2% of 24.0 GiB" in plain(head)
    assert plain(row).endswith("▏ 80.0 MiB")
    full = Gauge("VRAM", 18 << 30, 24 << 30)
    head, row = gauge_lines(full, 60)
    assert "18.0 GiB / 24.0 GiB" in plain(head)
    assert plain(row).endswith("▏"), "a bar to the total needs no label"


def test_the_bar_shades_the_way_to_the_peak_and_marks_the_prediction() -> None:
    row = plain(bar(20.0, 100.0, 10, tick=70.0, reached=50.0))
    assert row == "██▒▒▒··┃··"
    assert plain(bar(20.0, 100.0, 10, reached=10.0)) == "██········"


@pytest.mark.parametrize(
    ("peak", "role", "why"),
    [(100, "good", ""), (119, "good", ""), (121, "warn", "more than predicted"),
     (171, "warn", "filling up"), (191, "bad", "nearly full")],
)  # fmt: skip
def test_a_gauge_changes_colour_above_its_band_and_near_its_limit(
    peak: int, role: str, why: str
) -> None:
    gauge = Gauge("VRAM", 50, 400, peak=peak, predicted=100, high=120, limit=200)
    assert gauge.level == (role, why)
    line = peak_line(gauge, 60)
    assert plain(line).endswith(why)
    assert plain(line).startswith(f" peak {peak} B, {peak} % of predicted 100 B")
    assert {s.role for s in gauge_lines(gauge, 60)[1]} >= {role}


def test_what_a_device_holds_in_all_is_shown_on_its_whole_size() -> None:
    line = whole_line("in all", 18 << 30, 24 << 30, 60, "5 % busy")
    assert plain(line).startswith(" in all 18.0 GiB / 24.0 GiB ▕█")
    assert plain(line).endswith("▏ 5 % busy")
    assert width_of(line) == 60


@given(st.floats(1, 2**50))
def test_a_scale_is_round_and_not_far_above(least: float) -> None:
    assert least * (1 - 1e-9) <= round_bytes(least) <= least * 2.1


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


def test_a_history_grows_by_its_last_column_alone() -> None:
    series = [(float(s), 40.0 + s % 3) for s in range(0, 100, 2)]
    charts = [
        [plain(row) for row in area(series[:n], 100.0, 80.0, 20, 2)]
        for n in range(1, len(series) + 1)
    ]
    for before, after in pairwise(charts):
        end = len(before[1].rstrip())
        assert [row[: end - 1] for row in after] == [row[: end - 1] for row in before]
    assert charts[-1] == [" " * 20, "█" * 20]


def test_a_history_shows_the_highest_of_a_column_and_colours_what_is_above_the_band() -> None:
    series = [(1.0, 10.0), (2.0, 60.0), (3.0, 20.0), (55.0, 79.0), (95.0, math.nan)]
    rows = area(series, 100.0, 80.0, 10, 2, line=70.0, most=75.0)
    assert [plain(row) for row in rows] == ["▄▄▄▄▄█┄┄┄┄", "██████    "]
    assert [[s.text for s in row if s.role == "warn"] for row in rows] == [["█"], ["█"]]
    assert [plain(row) for row in area([], 100.0, 80.0, 10, 2)] == [" " * 10] * 2


@pytest.mark.parametrize(("line", "dotted"), [(80.0, 0), (60.0, 0), (50.0, 1), (30.0, 2), (0.0, 3)])
def test_the_line_of_a_history_is_the_one_dotted_row_at_its_height(
    line: float, dotted: int
) -> None:
    rows = area([], 100.0, 80.0, 10, 4, line=line)
    assert [plain(row) for row in rows] == ["┄" * 10 if y == dotted else " " * 10 for y in range(4)]
    assert [row[0].role for row in rows] == ["tick" if y == dotted else "dim" for y in range(4)]


@given(st.lists(st.tuples(st.floats(), st.floats())), st.floats(), st.floats(), st.integers(-1, 9))
def test_a_history_has_its_size_whatever_the_numbers(
    series: list[tuple[float, float]], end: float, scale: float, width: int
) -> None:
    rows = area(series, end, scale, width, 3, line=scale)
    assert [len(plain(row)) for row in rows] == [max(0, width)] * 3


def test_a_history_says_what_its_ends_stand_for() -> None:
    curve = Curve((1, 50, 100), (10.0, 60.0, 90.0))
    gauge = Gauge("VRAM", 60, 24 << 30, peak=90, history=curve, last_step=100)
    rows = [plain(line) for line in history_lines(gauge, 40, 3)]
    assert rows[0].endswith(plain(gauge_lines(gauge, 40)[1])[-6:])
    assert rows[-1].endswith("▏ 0")


def test_a_history_has_a_sign_of_its_own_for_each_height_in_ascii() -> None:
    row = plain(area([(float(n), n + 1.0) for n in range(8)], 8.0, 8.0, 8, 1)[0])
    drawn = cleaned(row, ascii_only=True)
    assert drawn.isascii()
    assert len(set(drawn)) == 8
