"""What a person reads is whole: legends, notes of pickers, and the files that a task reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.tui.run.line_chart import legend
from memconsole.tui.screens.pick import Choice, PickScreen, choices_for
from tests.tui.harness import Console, screen_text, settle, snapshot


@pytest.mark.parametrize("width", range(34, 90))
def test_no_name_of_the_legend_is_cut(width: int) -> None:
    text = "".join(span.text for span in legend(snapshot(), False, width))
    assert "…" not in text
    assert ("unigram 5.712" in text) == ("unigram" in text)


async def test_the_note_of_the_selected_row_is_shown_whole(
    make_console: Callable[..., Console],
) -> None:
    note = "saves ~1.2 GiB · ×1.05 · ✓ fits · changes: adapters instead of the whole model"
    choices = [
        Choice("0", "LoRA adapters on a frozen base: 16", note, 36),
        Choice("1", "b", "short"),
    ]
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await app.push_screen(PickScreen("relaunch with", choices))
        await settle(pilot)
        assert note in " ".join(screen_text(app).split())
        await pilot.press("down")
        await settle(pilot)
        assert "instead of the whole model" not in screen_text(app)


def test_the_data_picker_offers_what_the_task_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far").mkdir()
    for name in ("near.h5", "far/windows.hdf5", "far/text.txt"):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    text, _ = choices_for("dataset", Plan(), None)
    assert "tinystories" in {choice.value for choice in text}
    plan = replace(Plan(), {"model.name": "lqr", "data.source": "far/windows.hdf5"})
    offered, typed = choices_for("dataset", plan, None)
    assert [choice.value for choice in offered] == ["near.h5", "far/windows.hdf5"]
    assert typed is not None
    assert ".h5" in typed
