"""Every screen at every size, in every colour depth, with hostile data everywhere."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from memconsole.devices.reading import Devices, Missing, Process
from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.record.log import events
from memconsole.runs.record.states import Verdict
from memconsole.tui.app.messages import SnapshotArrived
from memconsole.tui.screens.confirm import ConfirmAnswer, ConfirmScreen
from memconsole.tui.screens.pick import Choice, PickScreen
from memconsole.tui.screens.prompt import PromptScreen
from tests.tui.harness import (
    Console,
    cpu_reading,
    finished,
    readings,
    screen_lines,
    screen_text,
    settle,
    snapshot,
)

Make = Callable[..., Console]
SIZES = [(80, 24), (160, 48)]
RUNS: dict[str, RunSnapshot | None] = {
    "empty": None,
    "starting": snapshot(0, started=None, phase="starting", memory=None, sample=None, loss=None),
    "running": snapshot(),
    "finished": finished(),
    "failed": snapshot(
        state="failed",
        verdict=Verdict(reason="crashed", evidence="exit code 1", resumable=True),
        error=events.Error(cause="crash", message="it broke", traceback="…"),
    ),
}


TOUR = (["g"], ["a"], ["p", "question_mark"], ["escape", "c"], ["escape", "m"], ["escape", "s"],
        ["enter"], ["escape", "colon"], ["escape"])  # fmt: skip


async def open_everywhere(
    app: Console, pilot: Any, run: RunSnapshot | None, tour: bool = True
) -> list[str]:
    """Visit every screen (without `tour`: only plan and run); what each showed."""
    shown = []
    await settle(pilot)
    shown.append(screen_text(app))
    if run is not None:
        app.run_id = run.id
        app.post_message(SnapshotArrived(run))
        await settle(pilot)
        await pilot.press("t")
        await settle(pilot)
        for _ in range(3):
            shown.append(screen_text(app))
            await pilot.press("o")
            await settle(pilot)
    for keys in TOUR if tour else ():
        await pilot.press(*keys)
        await settle(pilot)
        shown.append(screen_text(app))
    return shown


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", RUNS)
async def test_every_screen_draws_within_its_size(
    make_console: Make, size: tuple[int, int], name: str
) -> None:
    app = make_console()
    async with app.run_test(size=size, notifications=True) as pilot:
        for text in await open_everywhere(app, pilot, RUNS[name], tour=name == "running"):
            lines = text.split("\n")
            assert len(lines) == size[1]
            assert " memconsole " in lines[0]
            assert "back" in lines[-1] or "quit" in lines[-1], "the way out is always shown"


@pytest.mark.parametrize("count", [0, 8, 16])
async def test_the_devices_screen_shows_each_device_and_what_is_missing(
    make_console: Make, count: int
) -> None:
    app = make_console()
    app.readings = readings(count)
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        await pilot.press("g")
        await settle(pilot)
        text = screen_text(app)
        assert "n/a — no sensor" in text
        for _ in range(count // 2):
            await pilot.press("pagedown")
            await settle(pilot)
            text += screen_text(app)
        for n in range(count):
            assert f"cuda:{n}" in text
        assert "AMD: no amdgpu device" in text


async def test_the_probe_not_having_answered_is_said(make_console: Make) -> None:
    app = make_console()
    app.readings = None
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("g")
        await settle(pilot)
        assert "reading the devices" in screen_text(app)


@pytest.mark.parametrize("size", [(59, 24), (80, 15), (1, 1), (20, 5)], ids=str)
async def test_under_60x16_one_line_says_so(make_console: Make, size: tuple[int, int]) -> None:
    app = make_console()
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        text = screen_text(app)
        assert "optimizations" not in text
        if size[0] >= 40:
            assert "at least 60x16 needed" in text


async def test_60x16_is_usable(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(60, 16)) as pilot:
        await settle(pilot)
        text = screen_text(app)
        assert "fits, " in text
        assert "›1 ○ mixed" in text
        await pilot.press("up")
        await settle(pilot)
        assert "›M ○ heap" in screen_text(app), "the list follows its cursor"


async def test_resizing_is_never_an_error(make_console: Make) -> None:
    app = make_console()
    app.readings = readings(8)
    sizes = [(1, 1), (200, 60), (2, 50), (80, 24), (300, 3), (60, 16), (59, 15), (100, 32), (3, 2),
             (150, 44), (80, 24)]  # fmt: skip
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.run_id = "x"
        app.post_message(SnapshotArrived(snapshot()))
        await settle(pilot)
        for keys in ([], ["t"], ["g"], ["a"], ["p", "m"], ["escape", "question_mark"]):
            await pilot.press(*keys)
            for size in sizes if keys == ["t"] else sizes[::4]:
                await pilot.resize_terminal(*size)
                await pilot.pause()
                lines = screen_lines(app)
                assert len(lines) == size[1]
        await pilot.press("escape")
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        assert "fits, " in screen_text(app)


async def test_ascii_means_ascii_on_every_screen(make_console: Make) -> None:
    app = make_console(ascii=True)
    async with app.run_test(size=(120, 40)) as pilot:
        for run in (finished(), snapshot()):
            for text in await open_everywhere(app, pilot, run, tour=run.state == "running"):
                assert text.isascii(), sorted({c for c in text if not c.isascii()})


@pytest.mark.parametrize(
    ("theme", "no_color"),
    [
        ("memconsole-light", False),
        ("ansi-dark", False),
        ("memconsole-dark", True),
        ("ansi-dark", True),
    ],
)
async def test_every_colour_depth_shows_the_same_text(
    make_console: Make, monkeypatch: pytest.MonkeyPatch, theme: str, no_color: bool
) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        app.theme = theme
        await settle(pilot)
        text = screen_text(app)
        assert "fits, " in text
        assert "› " in text or "›1" in text, "the selected row is marked by a character"
        for strip in app.screen._compositor.render_strips():
            assert all(segment.style is not None for segment in strip)
        app.run_id = "x"
        app.post_message(SnapshotArrived(snapshot()))
        await settle(pilot)
        await pilot.press("t")
        await settle(pilot)
        assert "predicted" in screen_text(app)


async def test_a_slow_link_gets_fewer_updates_and_the_terminals_colours(
    make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "1.2.3.4 5 6.7.8.9 22")
    slow, forced = make_console(), make_console(slow_link=False)
    assert (slow.interval_seconds, slow.theme) == (2.0, "ansi-dark")
    assert (forced.interval_seconds, forced.theme) == (1.0, "memconsole-dark")
    assert slow.animation_level == forced.animation_level == "none"
    async with slow.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "fits, " in screen_text(slow)


HOSTILE = [
    "[/", "[/some/path]", "[link=http://x]y", "[b]bold", "loss [b", "[@click=app.quit]x[/]", "$text",
    "\x1b[31mred", "\x1b]52;c;aGk=\x07", "\x1b]0;title\x1b\\", "\x9b31m", "\x90q\x9c", "\x1b[2J\x1b[H",
    "\r\n\t\v\f\b\a\x00\x7f", "\u202eabc\u202c", "\u2066x\u2069", "\u200b\ufeff", "a\u0301" * 50,
    "日本語" * 10, "👩‍👩‍👧‍👦" * 5, "x" * 10_000, "\ud800", "%s {0} {}", "\u2028next\u2029",
]  # fmt: skip


_SHORT = [text for text in HOSTILE if len(text) < 100]
TEXTS = [" ".join(_SHORT[n : n + 6]) for n in range(0, len(_SHORT), 6)]
TEXTS += [text for text in HOSTILE if len(text) >= 100]


def hostile_run(text: str) -> RunSnapshot:
    """A snapshot with `text` wherever a run carries text."""
    plan = msgspec.structs.replace(
        Plan(), model=plans.ModelChoice(name=text), data=plans.DataChoice(source=text), backend=text
    )
    memory = events.Memory(
        phase=text, step=1, allocated_bytes=1, peak_bytes=1, reserved_bytes=1, device_bytes=1,
        device_total_bytes=2, host_bytes=1,
    )  # fmt: skip
    return snapshot(
        id=text,
        name=text,
        plan=plan,
        state="failed",
        phase=text,
        phase_detail=text,
        verdict=Verdict(reason=text, evidence=text, resumable=True),
        started=events.Started(
            attempt=1, backend=text, versions={text: text}, device_id=text, device_name=text,
            device_kind=text, memory_label=text, platform_lines=(text,),
        ),
        memory=memory,
        sample=events.Sample(step=1, prompt=text, text=text),
        warnings=(text,),
        error=events.Error(cause=text, message=text, traceback=text),
        log_tail=(text, text),
        stop_requested_by=text,
    )  # fmt: skip


def hostile_devices(text: str) -> Devices:
    reading = cpu_reading(
        name=text,
        memory_label=text,
        source=text,
        temperature_celsius=Missing(text),
        processes=(Process(pid=1, name=text, used_bytes=Missing(text)),),
    )
    other = cpu_reading(id=text, kind=text, used_bytes=Missing(text), total_bytes=Missing(text))
    return Devices(devices=(reading, other), notes=(text,))


def assert_harmless(app: Console) -> None:
    for line in screen_lines(app):
        for character in line:
            category = unicodedata.category(character)
            assert category not in ("Cc", "Cs", "Zl", "Zp"), repr(character)
            assert not re.match("[\u202a-\u202e\u2066-\u2069\u200b\ufeff]", character)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
async def test_hostile_text_is_shown_and_does_nothing(make_console: Make, text: str) -> None:
    app = make_console()
    app.readings = hostile_devices(text)
    async with app.run_test(size=(100, 34), notifications=True) as pilot:
        await settle(pilot)
        run = hostile_run(text)
        app.run_id = run.id
        app.post_message(SnapshotArrived(run))
        await settle(pilot)
        for keys in (["t"], ["o"], ["o"], ["g"], ["p"]):
            await pilot.press(*keys)
            await settle(pilot)
            assert_harmless(app)
        screen = app.plan_screen
        assert screen.view.estimate is not None
        budget = msgspec.structs.replace(
            screen.view.estimate.table.budget, name=text, why=text, memory_label=text
        )
        table = msgspec.structs.replace(screen.view.estimate.table, budget=budget)
        savings = tuple(
            msgspec.structs.replace(s, reason=text, saves_bytes=0)
            for s in screen.view.estimate.savings
        )
        estimate = msgspec.structs.replace(screen.view.estimate, table=table, savings=savings)
        from dataclasses import replace

        for problem in ("", text):
            screen._show(replace(screen.view, estimate=estimate, problem=problem))
            screen.notice(text)
            await pilot.pause()
            assert_harmless(app)
        for modal in (
            PickScreen(text, [Choice(text, text, text)], text, text),
            PromptScreen(text, text, text, lambda word: text),
            ConfirmScreen(text, (ConfirmAnswer("delete", text),)),
        ):
            app.push_screen(modal)
            await settle(pilot)
            assert_harmless(app)
            if isinstance(modal, PromptScreen):
                await pilot.press("enter")
                await settle(pilot)
                assert_harmless(app)
            await pilot.press("escape")
            await settle(pilot)
        assert app.is_running
        assert app.screen is screen
    assert app.asked == []


async def test_pasted_control_characters_never_reach_the_entry(make_console: Make) -> None:
    from textual import events as textual_events

    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("m")
        await settle(pilot)
        app.post_message(textual_events.Paste("\x1b]52;c;aGk=\x07gpt2\x9b"))
        await settle(pilot)
        assert_harmless(app)


async def test_a_notice_takes_the_rows_its_words_need(make_console: Make) -> None:
    app = make_console()
    long = " ".join(f"word{n}" for n in range(25))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        before = screen_text(app)
        for words, rows in ((long, 3), ("short", 1), (f"{long} {long}", 3)):
            app.plan_screen.notice(words)
            await settle(pilot)
            assert app.plan_screen.query_one("#notice").size.height == rows
            shown, cut = " ".join(screen_text(app).split()), len(words) > 300
            assert (words in shown, "…" in screen_lines(app)[-2]) == (not cut, cut)
        app.plan_screen.notice("")
        await settle(pilot)
        assert screen_text(app) == before
