"""Two hundred hostile texts through everything that shows data, down to the bytes on the wire; and any size."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from rich.color import ColorSystem
from textual._compositor import LayoutUpdate
from textual.geometry import Region

from memconsole.devices.reading import Devices, Missing, Process
from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole.runs.read.shown.status import RunStatus
from memconsole.runs.record.log import events
from memconsole.runs.record.states import Verdict
from memconsole.tui.app.messages import SnapshotArrived
from memconsole.tui.app.terminal_diff import TerminalDiff
from memconsole.tui.runs.compare import CompareRunsScreen, RunsRead
from memconsole.tui.runs.runs_list import RunList
from memconsole.tui.runs.screen import RunsListed, RunsScreen
from memconsole.tui.screens.confirm import ConfirmAnswer, ConfirmScreen
from memconsole.tui.screens.pick import Choice, PickScreen
from memconsole.tui.screens.prompt import PromptScreen
from tests.tui.harness import Console, cpu_reading, readings, settle, snapshot

Make = Callable[..., Console]
PARTS = (
    "[/", "[/some/path]", "[link=http://x]y", "[b]", "[@click=app.leave]x[/]", "$text", "{0}", "%s",
    "\x1b[31m", "\x1b]52;c;aGk=\x07", "\x1b]0;title\x1b\\", "\x1b]8;;http://x\x1b\\", "\x1bP+q\x1b\\",
    "\x9b31m", "\x9d52;c;x\x9c", "\x90q\x9c", "\x1b[2J\x1b[H", "\x1b[?1049l", "\x1bc", "\r", "\n", "\t",
    "\v", "\f", "\b", "\a", "\x00", "\x7f", "\u202e", "\u2066", "\u2069", "\u200b", "\ufeff", "\u2028",
    "a\u0301", "日本", "👩\u200d👧", "\ud800", "\U000e0041", "word", " ", "9" * 400,
)  # fmt: skip
OURS = re.compile(r"\x1b\[(?:[0-9;]*m|[0-9]+;[0-9]+H)")
"""The only sequences that the drawing of cells sends."""


def hostile_texts(count: int = 200) -> list[str]:
    chance = random.Random(20261121)
    found = ["x" * 10_000, "\x1b[31m" * 3000, "日" * 5000]
    while len(found) < count:
        found.append("".join(chance.choice(PARTS) for _ in range(chance.randint(1, 12))))
    return found


TEXTS = hostile_texts()


def assert_harmless(app: Console) -> None:
    """What a terminal would be sent for the whole screen holds our own sequences and printable text alone."""
    width, height = app.size
    strips = [[strip] for strip in app.screen._compositor.render_strips()]
    sent = TerminalDiff().render(
        LayoutUpdate(strips, Region(0, 0, width, height)), width, height, ColorSystem.TRUECOLOR
    )
    rest = OURS.sub("", sent)
    odd = {c for c in rest if not (c.isprintable() or c == "\u00a0")}
    assert not odd, [hex(ord(c)) for c in odd]


def run_of(texts: list[str]) -> Any:
    """A run with hostile text wherever a run carries text."""
    chance = random.Random(len(texts[0]))

    def some() -> str:
        return chance.choice(texts)

    plan = msgspec.structs.replace(
        Plan(),
        model=plans.ModelChoice(name=some()),
        data=plans.DataChoice(source=some()),
        backend=some(),
    )
    return snapshot(
        id=some(), name=some(), plan=plan, state="failed", phase=some(), phase_detail=some(),
        verdict=Verdict(reason=some(), evidence=some(), resumable=True),
        started=events.Started(
            attempt=1, backend=some(), versions={some(): some()}, device_id=some(), device_name=some(),
            device_kind=some(), memory_label=some(), platform_lines=(some(), some()),
        ),
        sample=events.Sample(step=1, prompt=some(), text=some()),
        warnings=(some(), some()),
        error=events.Error(cause="out_of_memory", message=some(), traceback=some(), requested_bytes=5),
        log_tail=tuple(texts), stop_requested_by=some(),
    )  # fmt: skip


def devices_of(texts: list[str]) -> Devices:
    one = cpu_reading(
        name=texts[0], memory_label=texts[1], source=texts[2], power_watts=Missing(texts[3]),
        processes=tuple(Process(pid=n, name=t, used_bytes=Missing(t)) for n, t in enumerate(texts[:4])),
    )  # fmt: skip
    other = cpu_reading(id=texts[4], kind=texts[4], used_bytes=Missing(texts[4]))
    return Devices(devices=(one, other), notes=tuple(texts[:5]))


LATER = pytest.mark.slow
"""More of the same, by `make soak`."""


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=LATER) for n in range(1, 8))])
async def test_hostile_text_shows_as_text_and_does_nothing(make_console: Make, part: int) -> None:
    texts = TEXTS[part::8]
    assert len(texts) == 25
    app = make_console()
    app.readings = devices_of(texts)
    async with app.run_test(size=(110, 36), notifications=True) as pilot:
        await settle(pilot)
        run = run_of(texts)
        app.run_id = run.id
        app.post_message(SnapshotArrived(run))
        await settle(pilot)
        for keys in (["t"], ["o"], ["o"], ["o"], ["g"], ["a"]):
            await pilot.press(*keys)
            await settle(pilot)
            assert_harmless(app)
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        listed = tuple(
            RunStatus(
                id=text, name=text, state="running", phase=text, step=1, total_steps=2, loss=1.0,
                backend=text, model=text, created_wall=1.0,
            )
            for text in texts
        )  # fmt: skip
        screen.post_message(RunsListed(RunList(listed, len(listed), tuple(texts)), 0.0))
        await settle(pilot)
        assert_harmless(app)
        compare = CompareRunsScreen(())
        app.push_screen(compare)
        await settle(pilot)
        compare.post_message(RunsRead((run, run), texts[0]))
        await settle(pilot)
        assert_harmless(app)
        await pilot.press("escape", "p")
        await settle(pilot)
        for text in texts:
            app.notify(text, title=text, markup=False)
            app.plan_screen.notice(text)
        await pilot.pause()
        for modal in (
            PickScreen(texts[5], [Choice(t, t, t) for t in texts], texts[6], texts[7]),
            PromptScreen(texts[8], texts[9], texts[10], lambda word: texts[11]),
            ConfirmScreen(
                texts[12], (ConfirmAnswer("stop", texts[0]), ConfirmAnswer("kill", texts[1]))
            ),
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
        assert app.screen is app.plan_screen
    assert app.asked == []


@pytest.mark.parametrize("devices", [0, *(pytest.param(n, marks=LATER) for n in (1, 8)), 16])
async def test_no_size_is_an_error(make_console: Make, devices: int) -> None:
    chance = random.Random(devices)
    app = make_console()
    app.readings = readings(devices) if devices else Devices(devices=(), notes=())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.run_id = "x"
        app.post_message(SnapshotArrived(snapshot()))
        await settle(pilot)
        for keys in (
            [],
            ["t"],
            ["g"],
            ["a"],
            ["p", "m"],
            ["escape", "question_mark"],
            ["escape", "c"],
        ):
            await pilot.press(*keys)
            sizes = [(1, 1), (300, 100), (chance.randint(1, 300), chance.randint(1, 100))]
            for width, height in sizes:
                await pilot.resize_terminal(width, height)
                await pilot.pause()
                assert app.size == (width, height)
                assert_harmless(app)
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        assert app.is_running
