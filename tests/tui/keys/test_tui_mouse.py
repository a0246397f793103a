"""The mouse: rows, buttons of the footer, answers and charts; the wheel; and leaving it to the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from textual.drivers.linux_driver import LinuxDriver

from memconsole.plan.plan import Plan
from memconsole.runs.record.run_store import create_run
from memconsole.tui.app.clicks import ClickDriver
from memconsole.tui.keys.rows import for_screen
from memconsole.tui.run.charts import large_chart
from memconsole.tui.screens.confirm import ConfirmAnswer, ConfirmScreen
from memconsole.tui.screens.pick import Choice, PickScreen
from memconsole.tui.widgets.key_bar import key_at, key_line, shown_keys
from tests.tui.harness import Console, screen_lines, screen_text, settle, show_run
from tests.tui.run.test_tui_charts import lqr

Make = Callable[..., Console]


async def click(app: Console, pilot: Any, words: str) -> None:
    """Click where these words stand."""
    rows = screen_lines(app)
    y = next(n for n, row in enumerate(rows) if words in row)
    await pilot.click(offset=(rows[y].index(words), y))
    await settle(pilot)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_cells_of_a_footer_entry_belong_to_its_key(width: int) -> None:
    keys = for_screen("run")
    text = "".join(span.text for span in key_line(keys, width))
    for key in shown_keys(keys, width):
        at = text.index(f" {key.shown} {key.label} ")
        found = {
            key_at(keys, width, x) for x in range(at, at + len(key.shown) + len(key.label) + 3)
        }
        assert found == {key}
    assert key_at(keys, width, len(text) + 1) is None


async def test_footer_entries_are_buttons_and_only_those_that_are_offered(
    make_console: Make,
) -> None:
    app = make_console(readonly=True)
    async with app.run_test(size=(220, 30)) as pilot:
        await settle(pilot)
        await click(app, pilot, "g devices")
        assert screen_text(app).startswith(" memconsole  devices")
        await click(app, pilot, "esc back")
        assert screen_text(app).startswith(" memconsole  plan")


async def test_a_click_selects_a_run_and_a_second_one_opens_it(make_console: Make) -> None:
    for name in ("walnut", "cherry", "hazel"):
        create_run(Plan(), name)
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press("a")
        await settle(pilot)

        def selected() -> bool:
            return any("›" in row and "walnut" in row for row in screen_lines(app))

        for _ in range(5):  # The list may be read again, and its rows move, before a click arrives.
            if not selected():
                await click(app, pilot, "walnut")
        assert selected()
        await click(app, pilot, "walnut")
        assert screen_text(app).startswith(" memconsole  run")


async def test_a_click_selects_an_optimization_and_a_second_one_steps_it(
    make_console: Make,
) -> None:
    app = make_console()
    async with app.run_test(size=(100, 40)) as pilot:
        await settle(pilot)
        before = app.plan_screen.view.plan
        await click(app, pilot, "gradient accumulation")
        assert app.plan_screen.view.row.key == "optimize.accumulation_steps"
        assert app.plan_screen.view.plan == before
        await click(app, pilot, "gradient accumulation")
        assert app.plan_screen.view.plan.optimize.accumulation_steps > 1


async def test_a_click_takes_a_choice_and_the_wheel_moves_the_selection(make_console: Make) -> None:
    choices = [Choice(str(n), f"choice {n:02d}") for n in range(40)]
    taken: list[object] = []
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await app.push_screen(PickScreen("take one", choices), taken.append)
        await settle(pilot)
        await pilot._post_mouse_events([_wheel()], offset=(10, 10))
        await settle(pilot)
        assert any("›" in row and "choice 03" in row for row in screen_lines(app))
        await click(app, pilot, "choice 05")
        assert taken == []
        await click(app, pilot, "choice 05")
    assert taken == ["5"]


def _wheel() -> type:
    from textual.events import MouseScrollDown

    return MouseScrollDown


@pytest.mark.parametrize(("words", "answer"), [("end at once", "kill"), ("change nothing", None)])
async def test_an_answer_can_be_clicked(make_console: Make, words: str, answer: str | None) -> None:
    taken: list[object] = []
    answers = (ConfirmAnswer("stop", "save, then stop"), ConfirmAnswer("kill", "end at once"))
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await app.push_screen(ConfirmScreen("Stop it?", answers), taken.append)
        await settle(pilot)
        await click(app, pilot, "Stop it?")
        assert taken == []
        await click(app, pilot, words)
    assert taken == [answer]


async def test_a_click_on_a_small_chart_makes_it_the_large_one(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(160, 48)) as pilot:
        await show_run(app, pilot, lqr())
        await click(app, pilot, "gradient norm 0.8")
        large = large_chart(app.run_view)
        assert large is not None
        assert large.name == "gradient norm"
        await click(app, pilot, "output ─")
        assert app.run_view.pane == "sample"


def test_the_terminal_is_asked_for_clicks_and_not_for_movements() -> None:
    sent: list[str] = []

    class Driver(ClickDriver):
        def __init__(self, mouse: bool) -> None:
            self._mouse = mouse

        def write(self, data: str) -> None:
            sent.append(data)

        def flush(self) -> None:
            pass

    driver = Driver(mouse=False)
    driver._enable_mouse_support()
    assert sent == []
    driver.take_mouse(True)
    assert sent == ["\x1b[?1000h", "\x1b[?1006h"]
    sent.clear()
    driver.take_mouse(False)
    assert {"\x1b[?1000l", "\x1b[?1006l"} <= set(sent)
    assert issubclass(ClickDriver, LinuxDriver)
