"""Bytes, counts and durations: what is printed reads back as what was meant."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_step,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (3.1 * GIB, "3.10 GiB"),
        (12 * GIB, "12.0 GiB"),
        (999.96 * MIB, "1000 MiB"),
        (1023.9 * MIB, "1.00 GiB"),
        (-1.2 * GIB, "-1.20 GiB"),
        (2 * TIB, "2.00 TiB"),
    ],
)
def test_bytes_print_three_figures_in_binary_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_printed_bytes_read_back_within_half_a_percent(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.0051)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12GiB", 12 * GIB),
        ("12 GB", 12 * 10**9),
        (" 1.5mib ", 3 * MIB // 2),
        ("500kb", 500_000),
        ("7b", 7),
        ("4_096", 4096),
        ("1e9", 10**9),
        ("0", 0),
    ],
)
def test_bytes_are_read_with_binary_and_decimal_suffixes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "twelve", "-1", "-3GiB", "inf", "nan", "1e400gb", "1/2"]
)
def test_what_is_no_amount_of_bytes_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_bytes(text)


@given(st.text() | st.from_regex(r"-?[0-9]{0,3}\.?[0-9]{0,2} ?([kKMGT]i?)?B?", fullmatch=True))
def test_parsing_bytes_raises_nothing_but_value_errors(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_bytes(text) >= 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (34_083_904, "34.1 M"), (1_235_814_400, "1.24 B"), (9_995, "10.0 k")],
)
def test_counts_print_with_letters(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (45.2, "45 s"),
        (59.7, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.8, "1 h 00 min"),
        (8040, "2 h 14 min"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
        (float("inf"), "n/a"),
        (float("nan"), "n/a"),
    ],
)
def test_durations_carry_over_into_the_next_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (94e-6, "94 µs"),
        (999.7e-6, "1.0 ms"),
        (0.0042, "4.2 ms"),
        (0.31, "310 ms"),
        (0.9996, "1.0 s"),
        (75, "1 min 15 s"),
    ],
)
def test_a_step_below_a_second_is_told_in_small_units(seconds: float, text: str) -> None:
    assert format_step(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.0, "0"), (0.379, "0.38"), (8.34, "8.3"), (9.96, "10"), (76.4, "76"), (8321.2, "8,321")],
)
def test_a_slow_rate_has_two_figures_and_is_not_zero(rate: float, text: str) -> None:
    assert format_rate(rate) == text
