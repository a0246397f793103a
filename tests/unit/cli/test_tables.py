"""Tables in terminals of several widths."""

from __future__ import annotations

import pytest

from memconsole.cli import tables
from memconsole.cli.plans.plan_words import _saving_rows
from memconsole.memory.table import Saving, Tier

ROWS = [
    [
        "optimizer",
        "lion",
        "saves 4 MiB",
        "a note of quite a few words, longer than what is left of the line",
    ]
]


def in_terminal(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "terminal_width", lambda: width)


@pytest.mark.parametrize(("width", "expected"), [(None, 1), (200, 1), (72, 2), (40, 3)])
def test_the_last_column_is_wrapped_in_a_terminal(
    width: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_terminal(width, monkeypatch)
    lines = tables.columns(ROWS, left=(0, 1, 2, 3))
    assert len(lines) == expected
    assert width is None or all(len(line) <= width for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(ROWS[0])


def test_numbers_are_distributed_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ["", "forward", "loss", "backward", "evaluation"],
        ["weights", "1 MiB", "2 MiB", "3 MiB", "4 MiB"],
    ]
    in_terminal(None, monkeypatch)
    assert len(tables.in_blocks(rows)) == 2
    in_terminal(35, monkeypatch)
    lines = tables.in_blocks(rows)
    assert [line.split() for line in lines] == [
        ["forward", "loss"], ["weights", "1", "MiB", "2", "MiB"], [],
        ["backward", "evaluation"], ["weights", "3", "MiB", "4", "MiB"],
    ]  # fmt: skip
    in_terminal(10, monkeypatch)
    assert len(tables.in_blocks(rows)) == 2, "no number of blocks is narrow enough"


def test_changes_are_named_as_set_takes_them_and_values_with_the_same_effect_share_a_line() -> None:
    def saving(key: str, value: object, saves: int = 0) -> Saving:
        return Saving(
            key=key,
            value=value,
            saves_bytes=saves,
            tier=Tier.FORMULA,
            time_factor=1.0,
            reason="",
            available=True,
        )

    found = [
        *(saving("train.batch_size", n, n << 20) for n in (1, 2)),
        *(saving("data.shuffle_buffer", n) for n in (1_000, 5_000)),
        *(saving("data.limit", n) for n in (10, 20, 30)),
        saving("optimize.fused_loss", True, 1),
        saving("data.sequence_length", 64, 1),
        *(saving("data.sequence_length", n) for n in (128, 256, 512)),
    ]
    words = [line.split("  ") for line in _saving_rows(found)]
    assert words[1][0] == "train.batch_size"
    assert [[cell.strip() for cell in line if cell][1] for line in words] == [
        "memory", "1", "2", "1000, 5000", "any", "true", "64", "128 … 512",
    ]  # fmt: skip
