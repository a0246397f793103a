"""The main job by keys on a real terminal: pick, preview, toggle, launch, leave, come back, stop."""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from terminal import Terminal, launch

from memconsole.tui.screens.base import HELD_SECONDS
from tests.shell import COMMAND, memconsole, wait_for_step

SMALL = [
    "--set", "model.target_params=500000", "--set", "data.vocab_size=1024",
    "--set", "data.sequence_length=32", "--set", "train.batch_size=4",
    "--set", "train.epochs=1000", "--set", "train.sample_tokens=8",
    "--set", "data.max_examples=12", "--set", "train.max_steps=100000",
]  # fmt: skip
RESTORED = (b"\x1b[?1049l", b"\x1b[?25h")
"""Main screen and cursor back."""
SLOW = 120.0

Open = Callable[..., Terminal]


@pytest.fixture
def opened(environment: dict[str, str]) -> Iterator[Open]:
    terminals: list[Terminal] = []

    def open_terminal(*arguments: str, columns: int = 80, rows: int = 24) -> Terminal:
        terminals.append(Terminal([*COMMAND, *arguments], environment, columns, rows))
        return terminals[-1]

    yield open_terminal
    for terminal in terminals:
        terminal.close()


def test_ctrl_z_goes_back_to_the_shell_and_fg_shows_the_console_again(
    environment: dict[str, str],
) -> None:
    shell = Terminal(["bash", "--norc", "-i"], environment)
    try:
        shell.press(shlex.join(COMMAND), "enter")
        shell.wait_for("q quit", 60)
        shell.press("ctrl+z")
        shell.wait_for("Stopped")
        shell.press("echo $((6 * 7))", "enter")
        shell.wait_for("(?m)^42")
        shell.press("fg", "enter")
        shell.wait_for("(?m)^ d data")
        shell.press("q")
        shell.wait_gone("memconsole  plan")
    finally:
        shell.close()


def test_ctrl_z_says_that_no_shell_waits(opened: Open) -> None:
    console = opened()
    console.wait_for("q quit", 60)
    console.press("ctrl+z")
    console.wait_for("no shell waits for this console")
    console.press("q")
    assert console.exit_code() == 0


def newest(env: dict[str, str]) -> dict:
    return json.loads(memconsole(env, "runs", "--json"))[0]


def pick(terminal: Terminal, key: str, kind: str, word: str, expected: str) -> None:
    terminal.press(key)
    terminal.wait_for(f"choose the {kind}")
    terminal.press(word)
    terminal.wait_for(f"› *{word}|{word}")
    terminal.press("enter")
    terminal.wait_gone(f"choose the {kind}")
    terminal.wait_for(expected)


def wait_for_mebibytes(terminal: Terminal, least: float, most: float) -> float:
    """The allocated MiB of the table, once they lie between two bounds, by formula or traced."""
    deadline = time.monotonic() + 20
    while True:
        shown = float(terminal.wait_for(r"allocated +[~=✓] *([\d.]+) MiB").group(1))
        if least < shown < most or time.monotonic() > deadline:
            assert least < shown < most
            return shown
        time.sleep(0.1)


@pytest.mark.timeout(900)
def test_the_whole_story_by_keys(opened: Open, environment: dict[str, str]) -> None:
    console = opened(*SMALL)
    console.wait_for("fits, .* free")

    pick(console, "e", "backend", "jax", r"e backend +jax")
    pick(console, "e", "backend", "torch", r"e backend +torch")
    pick(console, "v", "device", "rtx-3060-12gb", "VRAM 12.0 GiB")
    pick(console, "v", "device", "cpu", r"v device +cpu")
    pick(console, "m", "model", "gpt2-xl", "from scratch · 1.56 B")
    console.press("u")
    console.wait_for(r"stories")

    before = wait_for_mebibytes(console, 0, 1000)
    console.press("5")
    console.wait_for(r"chunked loss +on")
    console.press("5")
    console.wait_for(r"chunked loss +off")
    console.press("b")
    console.wait_for(r"micro-batch +8")
    wait_for_mebibytes(console, 1.03 * before, 2 * before)
    console.press("u")
    console.wait_for(r"micro-batch +4")
    wait_for_mebibytes(console, 0.97 * before, 1.03 * before)

    launch(console)
    console.wait_for("running", SLOW)
    console.wait_for(r"step [1-9][\d,]*/100,000", SLOW)
    console.press("q")
    assert console.exit_code() == 0
    assert "memconsole attach" in console.text
    assert all(sequence in console.raw for sequence in RESTORED)

    seen = newest(environment)
    assert seen["state"] == "running"
    wait_for_step(environment, seen["id"], seen["step"] + 1)

    again = opened()
    again.wait_for(seen["id"])
    again.wait_for("running")
    again.press("s")
    again.wait_for("Stop run")
    again.press("escape")
    again.wait_for("running")
    again.press("s")
    again.wait_for("Stop run")
    time.sleep(HELD_SECONDS)
    again.press("s")
    again.wait_for("stopped", SLOW)
    again.press("r")
    again.wait_for("running", SLOW)
    again.wait_gone("stopped")
    again.press("q")
    assert again.exit_code() == 0

    stopped = json.loads(memconsole(environment, "report", seen["id"], "--json"))
    assert stopped["attempts"] == 2


@pytest.mark.timeout(600)
def test_a_finished_run_shows_its_summary(opened: Open, environment: dict[str, str]) -> None:
    console = opened(*SMALL, "--set", "train.max_steps=12", columns=160, rows=48)
    console.wait_for("fits, .* free")
    launch(console)
    console.wait_for("finished", SLOW)
    console.wait_for(r"memory peak\s+measured [\d.]+ [KMG]iB", SLOW)
    console.wait_for("unigram")
    console.press("p")
    console.wait_for("optimizations")


@pytest.mark.timeout(600)
def test_a_dropped_link_leaves_the_run_training(opened: Open, environment: dict[str, str]) -> None:
    console = opened(*SMALL)
    console.wait_for("fits, .* free")
    launch(console)
    console.wait_for(r"step [1-9]", SLOW)
    console.hang_up()
    console.exit_code()
    seen = newest(environment)
    assert seen["state"] == "running"
    wait_for_step(environment, seen["id"], seen["step"] + 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(opened: Open, number: signal.Signals) -> None:
    console = opened(*SMALL)
    console.wait_for("fits, .* free")
    os.kill(console.process.pid, number)
    console.exit_code()
    end = time.monotonic() + 5
    while not all(s in console.raw for s in RESTORED) and time.monotonic() < end:
        time.sleep(0.1)
    assert all(sequence in console.raw for sequence in RESTORED)


def test_a_plan_with_a_mistake_is_one_line_and_no_screen(opened: Open) -> None:
    console = opened("--set", "train.batch_sise=3")
    assert console.exit_code() == 2
    assert re.search(r'unknown key "train.batch_sise".*batch_size', console.text.replace("\n", ""))
    assert b"\x1b[?1049h" not in console.raw
