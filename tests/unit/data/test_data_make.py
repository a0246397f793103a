"""Sizes, options and the progress bar of `memconsole data make`."""

from __future__ import annotations

import io

import pytest

from memconsole.plan.data.made import Kind, Option, Size, parse_options, parse_size
from memconsole.plan.plan import PlanError
from memconsole_trainer.data.make.bar import Bar

WALKS = Kind(
    "walks", "random walks", "steps", (Option("noise", 0.5, "its size"), Option("n", 2, ""))
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("100000", Size(100_000, None)),
        ("100_000", Size(100_000, None)),
        ("20k", Size(20_000, None)),
        ("1.5M", Size(1_500_000, None)),
        ("2GB", Size(None, 2_000_000_000)),
        ("512 MiB", Size(None, 512 << 20)),
    ],
)
def test_a_size_counts_units_or_bytes(text: str, size: Size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-5", "many", "1.5", "0GB", "nan k", "infM"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="expected a number of units"):
        parse_size(text)


def test_options_have_the_type_of_their_default() -> None:
    assert parse_options(WALKS, ["n=7"]) == {"noise": 0.5, "n": 7}
    with pytest.raises(PlanError, match='did you mean "noise"'):
        parse_options(WALKS, ["nois=1"])
    with pytest.raises(PlanError, match=r"expected a value like 0\.5"):
        parse_options(WALKS, ["noise=loud"])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_redraws_its_line_on_a_terminal_and_prints_tenths_elsewhere() -> None:
    def drawn(stream: io.StringIO) -> str:
        times = iter(float(second) for second in range(1000))
        bar = Bar("walks", "steps", stream, clock=lambda: next(times))
        for done in range(0, 201, 5):
            bar.at(done, 200)
        bar.end()
        return stream.getvalue()

    screen = drawn(_Terminal())
    assert screen.count("\r") == 41
    assert screen.count("\n") == 1
    lines = drawn(io.StringIO()).splitlines()
    assert len(lines) == 10
    assert lines[4].startswith("walks [############............]  50 %  100 of 200 steps")
    assert "left" in lines[4]
    assert "left" not in lines[-1]
