"""The console keeps to its budget of bytes and memory on a real terminal; times are printed by ``make bench``."""

from __future__ import annotations

import time
from collections.abc import Iterator

import bar
import psutil
import pytest

WIDE = 10
"""Times depend on what else the machine does: here they only must not be of another kind."""


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with bar.environment() as env:
        yield env


def test_watching_a_live_run_costs_less_than_a_kilobyte_a_second(
    environment: dict[str, str],
) -> None:
    rate, _, rss = bar.watching(environment, 8)
    assert 0 < rate <= 1000
    assert rss < 90


def test_a_plan_that_nobody_touches_is_silent(environment: dict[str, str]) -> None:
    # Free memory that moved by a percent is news, and a few cells.
    assert bar.idle_bytes(environment, 5) < 300


def test_a_toggle_costs_less_than_four_kilobytes(environment: dict[str, str]) -> None:
    _, sizes = bar.toggling(environment, 8)
    assert 0 < max(sizes) <= 4096


def test_a_slow_link_holds_nothing_up(environment: dict[str, str]) -> None:
    effect, leave = bar.slow_link(environment)
    assert effect < 0.5 * WIDE
    assert leave < 2.0 * WIDE


def test_the_first_screen_is_small_and_a_repaint_brings_it_again(
    environment: dict[str, str],
) -> None:
    with bar.opened(environment) as terminal:
        terminal.wait_for("fits, .* free")
        terminal.rest(1.0, 10)
        assert len(terminal.raw) < 12_000
        seen, before = terminal.text, len(terminal.raw)
        terminal.send("ctrl+l")
        end = time.monotonic() + 20
        while len(terminal.raw) - before <= 3000 and time.monotonic() < end:
            time.sleep(0.05)
        terminal.rest(1.0, 10)
        assert len(terminal.raw) - before > 3000
        # The plan alone: the numbers beside it may have become exact meanwhile.
        again, first = (
            [row[:44] for row in text.splitlines()[2:6]] for text in (terminal.text, seen)
        )
        assert again == first
        assert any("python-stdlib" in row for row in first)


def test_the_first_screen_holds_less_than_90_mib(environment: dict[str, str]) -> None:
    with bar.opened(environment) as terminal:
        terminal.wait_for("fits, .* free")
        terminal.rest(1.0, 10)
        assert psutil.Process(terminal.process.pid).memory_info().rss < 90 << 20
