"""The loss chart as a function of values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.tui.draw.axes import Axes, nice_ratio, number, x_axis_end, y_axis, y_labels
from memconsole.tui.draw.chart import GLYPHS, Series, choose_axes, plot
from memconsole.tui.draw.lines import plain, width_of
from memconsole.tui.draw.words import measure_word
from memconsole.units import format_measure

values = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True, width=32),
    st.floats(min_value=0.5, max_value=12),
    st.just(0.0),
)
curves = st.lists(values, max_size=60).map(
    lambda ys: tuple((float(10 * n), y) for n, y in enumerate(ys, 1))
)


def drawn(series: tuple[Series, ...], width: int, height: int, **options: object) -> list[str]:
    axes = choose_axes(series, total=None, logarithmic=False)
    return [plain(line) for line in plot(series, axes, width, height, **options)]  # type: ignore[arg-type]


@given(
    curves, curves, st.integers(0, 120), st.integers(0, 40), st.booleans(), st.booleans(),
    st.sampled_from(GLYPHS), st.one_of(st.none(), st.integers(0, 10**7)), values,
)  # fmt: skip
def test_any_curve_in_any_size_gives_exactly_the_rows_asked_for(
    train: tuple[tuple[float, float], ...],
    validation: tuple[tuple[float, float], ...],
    width: int,
    height: int,
    logarithmic: bool,
    recent: bool,
    glyphs: str,
    total: int | None,
    baseline: float,
) -> None:
    series = (Series(train), Series(validation, "validation", "◆"))
    axes = choose_axes(
        series, total=float(total) if total else None, logarithmic=logarithmic, recent=recent
    )
    lines = plot(series, axes, width, height, glyphs=glyphs, baseline=baseline, marks=(40.0,))
    assert len(lines) == (height if width > 0 else 0)
    assert all(width_of(line) <= max(width, 1) for line in lines)


@pytest.mark.parametrize("glyphs", GLYPHS)
def test_the_first_and_the_last_point_are_drawn_where_they_are(glyphs: str) -> None:
    points = ((0.0, 8.0), (500.0, 5.0), (1000.0, 2.0))
    axes = Axes(0.0, 1000.0, 2.0, 8.0)
    lines = [plain(line) for line in plot((Series(points),), axes, 60, 12, glyphs=glyphs)]
    body = [line[7:] for line in lines[:-1]]
    assert body[0][0] not in " ", "the first point is the top left dot"
    assert len(body[-1].rstrip()) == 53, "the last, the bottom right"


def test_one_point_is_one_cell() -> None:
    body = drawn((Series(((5.0, 3.0),)),), 40, 8)
    dots = [c for line in body[:-1] for c in line[7:] if c != " "]
    assert len(dots) == 1


def test_no_point_leaves_an_empty_frame() -> None:
    body = drawn((Series(()),), 40, 8)
    assert all(not line[7:].strip() for line in body[:-1])


def test_points_that_are_not_finite_are_left_out() -> None:
    clean = ((10.0, 4.0), (30.0, 3.0))
    dirty = ((10.0, 4.0), (20.0, math.nan), (25.0, math.inf), (30.0, 3.0))
    assert drawn((Series(clean),), 60, 10) == drawn((Series(dirty),), 60, 10)


def test_a_further_point_within_the_axes_changes_few_cells() -> None:
    points = [(float(s), 3 + 5 * math.exp(-s / 300)) for s in range(0, 600, 5)]
    axes = choose_axes((Series(tuple(points)),), total=1200, logarithmic=False)
    before = plot((Series(tuple(points[:-1])),), axes, 78, 16)
    after = plot((Series(tuple(points)),), axes, 78, 16)
    changed = sum(
        a != b
        for x, y in zip(before, after, strict=True)
        for a, b in zip(plain(x), plain(y), strict=True)
    )
    assert 0 <= changed <= 3


def test_the_axes_stay_while_new_values_are_inside() -> None:
    first = choose_axes((Series(((1.0, 8.0), (2.0, 3.2))),), total=100, logarithmic=False)
    later = choose_axes(
        (Series(((1.0, 8.0), (2.0, 3.2), (3.0, 3.4))),),
        total=100,
        logarithmic=False,
        previous=first,
    )
    assert later == first


def test_the_baseline_is_drawn_beneath_the_curve() -> None:
    axes = Axes(0.0, 100.0, 0.0, 10.0)
    lines = plot((Series(((0.0, 5.0), (100.0, 5.0))),), axes, 50, 10, baseline=8.0)
    rows = [plain(line)[7:] for line in lines]
    assert sum("┄" in row for row in rows) == 1


def test_epoch_ends_are_marked_on_the_axis() -> None:
    axes = Axes(0.0, 1200.0, 0.0, 10.0)
    axis = plain(plot((), axes, 60, 10, marks=(400.0, 800.0))[-1])
    assert axis.count("┴") == 2
    assert axis.rstrip().endswith("1,200 step")


def test_validation_marks_differ_from_the_train_line_in_shape() -> None:
    series = (Series(((0.0, 1.0), (9.0, 2.0))), Series(((5.0, 1.5),), "validation", "◆"))
    assert any("◆" in line for line in drawn(series, 50, 10))


def test_ascii_draws_only_ascii() -> None:
    series = (Series(tuple((float(n), 8.0 / n) for n in range(1, 50))),)
    axes = choose_axes(series, total=None, logarithmic=False)
    rows = [plain(line)[7:] for line in plot(series, axes, 60, 12, glyphs="ascii", baseline=2.0)]
    assert all(row.isascii() for row in rows[:-1])


@given(st.floats(min_value=1, max_value=1e12))
def test_the_horizon_holds_the_last_step(last: float) -> None:
    assert x_axis_end(last, None) >= last
    assert x_axis_end(last, last * 2) == max(last * 2, 1.0)


@given(st.lists(values, min_size=1), st.booleans())
def test_the_y_range_holds_every_value_it_can(ys: list[float], logarithmic: bool) -> None:
    low, high = y_axis(ys, None, logarithmic)
    assert low < high
    usable = [y for y in ys if math.isfinite(y) and (y > 0 or not logarithmic)]
    slack = (high - low) * 1e-6
    assert all(low - slack <= y <= high + slack for y in usable)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_axis_numbers_are_short(value: float) -> None:
    assert len(number(value)) <= 8


def test_neighbouring_labels_differ_even_on_a_narrow_range() -> None:
    for low, high in ((0.12, 0.125), (3.0, 3.02), (9.9, 10.1), (0.0, 1.7e-3), (0.0, 12_000.0)):
        labels = list(y_labels(Axes(0, 1, low, high), 9).values())
        assert len(labels) == len(set(labels)) >= 2, labels


def test_a_logarithmic_axis_has_round_numbers() -> None:
    low, high = y_axis([0.0209, 2.03], None, True)
    assert (low, high) == (0.02, 5.0)
    assert set(y_labels(Axes(0, 1, low, high, True), 10).values()) == {"0.1", "1"}
    tall = list(y_labels(Axes(0, 1, low, high, True), 30).values())
    assert set(tall) == {"0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5"}


@given(st.floats(min_value=1e-30, max_value=1e30))
def test_round_numbers_stand_around_a_value(value: float) -> None:
    assert nice_ratio(value, up=False) <= value * (1 + 1e-9)
    assert nice_ratio(value, up=True) >= value * (1 - 1e-9)
    assert nice_ratio(value, up=True) <= 2.51 * nice_ratio(value, up=False)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (12_300, 12_400, ["12,300", "12,320", "12,340", "12,360", "12,380", "12,400"]),
        (25_600_000, 26_000_000, ["25.6M", "25.7M", "25.8M", "25.9M", "26.0M"]),
        (0, 30_000_000, ["0", "1e7", "2e7", "3e7"]),
        (0.0018, 0.00182, [".00180", ".00181", ".00182"]),
    ],
)
def test_numbers_along_an_axis_differ(low: float, high: float, expected: list[str]) -> None:
    assert list(y_labels(Axes(0, 1, low, high), 15).values()) == expected


@pytest.mark.parametrize(
    ("value", "word", "measured"),
    [
        (0.0123, "0.0123", "0.0123"),
        (0.000_082_4, "8.24e-05", "8.24e-05"),
        (-3.14159, "-3.142", "-3.1416"),
        (90_108.04, "90,108.0", "90,108.0"),
        (25_942_290.6, "25.94M", "25,942,291"),
        (4e12, "4.00T", "4.000e+12"),
    ],
)
def test_a_large_measure_is_short(value: float, word: str, measured: str) -> None:
    assert measure_word(value) == word
    assert format_measure(value) == measured
