"""What a person reads is whole: legends, notes of pickers, and the files that a task reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len

from memconsole.memory.answers.advice import Remedy
from memconsole.memory.verdict import Verdict
from memconsole.plan.plan import Plan, replace
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.status import RunStatus
from memconsole.runs.record.log import events
from memconsole.runs.record.states import Verdict as Outcome
from memconsole.tui.draw.comparison_rows import difference_rows
from memconsole.tui.draw.lines import plain
from memconsole.tui.plan.dialogs.choices import choices_for
from memconsole.tui.plan.pricing import price
from memconsole.tui.plan.widgets.memory_table import table_lines
from memconsole.tui.run.epoch_table import epoch_lines
from memconsole.tui.run.header import ended_lines, header_lines
from memconsole.tui.run.line_chart import legend
from memconsole.tui.run.memory_gauges import memory_lines
from memconsole.tui.run.output_pane import OutputPane
from memconsole.tui.run.remedies import choices_of
from memconsole.tui.runs.rows import detail_lines, run_line
from memconsole.tui.screens.pick import Choice, PickScreen
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.views.run_view import RunView
from tests.tui.harness import Console, readings, screen_text, settle, snapshot, with_ranks


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


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 48)])
async def test_each_remedy_says_whole_whether_it_is_enough(
    size: tuple[int, int], make_console: Callable[..., Console]
) -> None:
    found = [
        Remedy(
            key="optimize.gradient_checkpointing",
            changes={},
            label="gradient checkpointing (remat): full",
            result=result,
            saves_bytes=saves,
            verdict=verdict,
            fits=verdict is not Verdict.DOES_NOT_FIT,
            time_factor=1.31,
        )
        for verdict, saves, result in (
            (Verdict.DOES_NOT_FIT, 80 * 2**20 + 2**19, "16-bit arithmetic"),
            (Verdict.TIGHT, 217 * 2**20, ""),
            (Verdict.FITS, 3 * 2**30, "adapters instead of the whole model"),
        )
    ]
    app = make_console()
    async with app.run_test(size=size) as pilot:
        await app.push_screen(PickScreen("relaunch with", choices_of(found)))
        await settle(pilot)
        text = screen_text(app)
        for words in (
            "✗ not enough · ~80.5 MiB · ×1.31",
            "▲ tight · ~217 MiB",
            "✓ fits · ~3.00 GiB",
        ):
            assert words in text
        assert "…" not in text
        whole = (
            "not enough, saves ~80.5 MiB and takes ×1.31 the time; it changes: 16-bit arithmetic."
        )
        assert whole in " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_why_a_run_failed_and_the_key_that_helps_are_whole(width: int) -> None:
    why = "the training step (64 rows of 64 tokens) asked for 2.00 MiB, more host RAM than is left"
    error = events.Error(cause="out_of_memory", message=f"{why}\nlower it\nalloc_cpu.cpp:124")
    ended = snapshot(
        state="failed", error=error, verdict=Outcome(reason="out_of_memory", evidence=why)
    )
    lines = header_lines(RunView(ended), width)
    said = " ".join("".join(span.text for span in line).strip() for line in lines[1:])
    if width >= 80:
        assert said == f"out of memory: {why} — f lists what would have saved it"
    assert said.endswith("— f lists what would have saved it")
    assert all(len(plain(line)) <= width for line in lines)
    assert len(lines) <= 3


def test_the_data_picker_offers_what_the_task_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far").mkdir()
    for name in ("near.h5", "chats.jsonl.gz", "notes.odt", "far/windows.hdf5", "far/text.txt"):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    text, _ = choices_for("dataset", Plan(), None)
    assert text[0].value == "python-stdlib"
    assert [choice.value for choice in text][-2:] == ["chats.jsonl.gz", "near.h5"]
    plan = replace(Plan(), {"model.name": "lqr", "data.source": "far/windows.hdf5"})
    offered, typed = choices_for("dataset", plan, None)
    assert [choice.value for choice in offered] == ["lqr", "near.h5", "far/windows.hdf5"]
    assert typed is not None
    assert ".h5" in typed
    assert not {"lqr", "ratings"} & {choice.value for choice in text}
    rated, typed = choices_for("dataset", replace(Plan(), {"model.name": "efficientids"}), None)
    assert [choice.value for choice in rated] == ["ratings"]
    assert typed == "path"


def waiting(live: bool) -> RunSnapshot:
    state = "starting" if live else "failed"
    return snapshot(0, state=state, memory=None, peak_bytes=None, peak_host_bytes=None, epochs=())


ON_CARD = replace(Plan(), {"device.name": "rtx-4090"})
CARD = events.Started(
    attempt=1, backend="torch", versions={}, device_id="cuda:0", device_name="GPU 0", device_kind="gpu",
    memory_label="VRAM", platform_lines=(),
)  # fmt: skip
ASKED_NOTHING = events.Memory(
    phase="train", step=1, allocated_bytes=None, peak_bytes=None, reserved_bytes=None, device_bytes=None,
    device_total_bytes=None, host_bytes=None,
)  # fmt: skip
WHY = "model.name = /data/checkpoints/step-000400: this folder is not here any more"


@pytest.mark.parametrize("width", [30, 35, 44, 56])
@pytest.mark.parametrize(
    ("run", "said"),
    [
        (waiting(live=True), "no reading yet"),
        (waiting(live=False), "left no reading"),
        (snapshot(3, plan=ON_CARD, started=CARD, memory=ASKED_NOTHING), "not reported here"),
        (with_ranks(8, ranks=()), "no reading yet"),
    ],
)
def test_the_reason_for_a_missing_reading_is_whole(run: RunSnapshot, said: str, width: int) -> None:
    rows = [plain(line) for line in memory_lines(RunView(run), width, 12)]
    assert said in " ".join(" ".join(rows).split())
    assert not any("…" in row for row in rows[1:])
    assert all(len(row) <= width for row in rows)


@pytest.mark.parametrize("run", [snapshot(3), snapshot(3, plan=ON_CARD, started=CARD)])
@pytest.mark.parametrize(("width", "height"), [(35, 12), (44, 15), (56, 26)])
def test_why_there_is_no_prediction_is_whole(run: RunSnapshot, width: int, height: int) -> None:
    lines = memory_lines(RunView(run, prediction_problem=WHY), width, height)
    text = "".join("".join(plain(line).split()) for line in lines)
    assert "".join(WHY.split()) in text
    assert "tensors" in text, "what was measured stays"


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 48)])
def test_a_long_name_leaves_room_for_model_backend_device_and_attempt(
    size: tuple[int, int],
) -> None:
    run = snapshot(name="n" * 150, attempt=3)
    row = plain(header_lines(RunView(run), size[0])[0])
    assert "n…  stories · torch · Test CPU · attempt 3" in row
    assert cell_len(row) <= size[0]
    assert plain(header_lines(RunView(snapshot(name="short")), size[0])[0]).startswith(
        " ● running  short  stories"
    )


@pytest.mark.parametrize("tags", [("a", "b"), tuple(f"tag-{n}" for n in range(30))])
@pytest.mark.parametrize("width", [58, 78, 98, 158])
def test_a_note_beside_tags_is_cut_with_a_sign(tags: tuple[str, ...], width: int) -> None:
    run = RunStatus(
        id="r", name="r", state="finished", phase="", step=1, total_steps=1, loss=None, backend="torch",
        model="stories", created_wall=1.0, tags=tags, note="word " * 60,
    )  # fmt: skip
    row = plain(detail_lines(run, width)[-1])
    assert row.endswith("…")
    assert cell_len(row) <= width
    assert row.count("…") == 1 + (len(tags) > 2)


def test_paths_that_differ_show_their_ends() -> None:
    paths = (
        "/data/of/a/long/folder/with/日本/texts-a.jsonl",
        "/data/of/another/long/folder/texts-b.jsonl",
    )
    compared = [replace(Plan(), {"data.source": path}) for path in paths]
    for cells in (12, 22, 30, 60):
        row = plain(difference_rows(compared, cells, 80)[1])
        assert "-a.jsonl" in row
        assert "-b.jsonl" in row
        assert row.count("…") == sum(cell_len(path) > cells - 1 for path in paths)


def test_a_list_of_runs_tells_models_that_are_paths_apart() -> None:
    def row(model: str) -> str:
        run = RunStatus(
            id="r", name="r", state="finished", phase="", step=1, total_steps=1, loss=None,
            backend="torch", model=model, created_wall=1.0,
        )  # fmt: skip
        return plain(run_line(run, 100, 2.0))

    assert "…e/w/llama " in row("/somewhere/w/llama")
    assert "…e/w/gemma " in row("/somewhere/w/gemma")
    assert " w/llama " in row("w/llama")
    assert " llama-3.2… " in row("llama-3.2-1b")


@pytest.mark.parametrize("width", [80, 100, 140, 180])
def test_how_a_run_stopped_is_not_cut_within_its_source(width: int) -> None:
    source = " (from its own last record; its exit code is unknown)"
    evidence = "stopped at step 818, saved as step-000000818"
    verdict = Outcome(reason="stopped", evidence=evidence + source, resumable=True)
    run = msgspec.structs.replace(snapshot(), state="stopped", verdict=verdict)
    row = plain(ended_lines(RunView(run), run, width)[0])
    assert row == f" {evidence}{source if width >= 140 else ''} — r resumes it"


@pytest.mark.parametrize(("state", "word"), [("running", "now"), ("failed", "last")])
def test_only_the_gauges_of_a_live_run_speak_of_now(state: str, word: str) -> None:
    run = msgspec.structs.replace(snapshot(), state=state)
    assert f"█ {word} ▒ peak ┃ predicted" in plain(memory_lines(RunView(run), 60, 12)[0])


@pytest.mark.parametrize("note", ["", "too much work"])
def test_why_a_run_ended_takes_the_line_of_its_note_if_it_has_none(note: str) -> None:
    run = RunStatus(
        id="r", name="r", state="failed", phase="", step=7, total_steps=9, loss=None, backend="torch",
        model="stories", created_wall=1.0, ended_by="killed", note=note,
        evidence="SIGKILL at step 7, phase train from outside memconsole; the kernel recorded no out-of-memory kill",
    )  # fmt: skip
    rows = [plain(line).strip() for line in detail_lines(run, 78)]
    assert len(rows) == 3
    assert rows[2] == note or rows[2].endswith("no out-of-memory kill")
    assert (" ".join(rows[1:]) == f"killed: {run.evidence}") == (not note)


@pytest.mark.parametrize("width", range(24, 58))
def test_the_heads_of_the_epochs_are_whole(width: int) -> None:
    head = plain(epoch_lines(RunView(snapshot()), width, 9)[1])
    assert "…" not in head
    assert len(head.split()) == 4


@pytest.mark.parametrize("height", range(2, 16))
def test_a_table_keeps_its_totals_and_says_how_many_rows_are_left_out(height: int) -> None:
    view = PlanView(Plan(), estimate=price(Plan(), readings()).estimate, stale=False)
    whole = [plain(line) for line in table_lines(view, 33, 99)]
    totals = whole[next(n for n, row in enumerate(whole) if row.startswith(" allocated")) :]
    shown = [plain(line) for line in table_lines(view, 33, height)]
    assert len(shown) == min(height, len(whole))
    if height == len(totals) + 1:
        assert shown[1:] == totals
    elif height <= len(totals):
        assert shown[-1] == f" … {len(totals) - height + 2} more rows"
    elif height < len(whole):
        assert shown[-len(totals) :] == totals
        assert shown[-len(totals) - 1] == f" … {len(whole) - height + 1} smaller"


def test_the_summary_says_how_many_lines_are_below() -> None:
    pane = OutputPane()
    pane._view = RunView(snapshot(), pane="summary")
    rows = [plain(line) for line in pane.draw(60, 5)]
    whole = pane.draw(60, 99)
    assert f"{len(whole) - 5} more lines below" in rows[0]
    assert "more lines" not in plain(whole[0])
