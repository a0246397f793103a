"""What the console costs on a terminal, measured on a real pseudo-terminal: the figures of ``make bench``.

`python tests/pty/bar.py` prints them beside what must be reached; `test_bar.py` holds the bytes to it. The
watched run is a real one, with a supervisor, locks, event log and output; only its steps compute nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from measure import environment, opened, used
from neighbours import Comparison, compare, told
from run_story import Story, end

WATCH_SECONDS = 30.0
TOGGLES = 40
EVENTS = 1_000_000
SLOW_LINK = 8_000
"""Bytes per second."""

TRAINER = """
import math, sys, time
from pathlib import Path
from memconsole.runs.record.log import events
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record.directory import RunDirectory

run, number = RunDirectory(Path(sys.argv[1])), int(sys.argv[2])
MIB = 2**20
with Attempt(run, number) as attempt:
    attempt.emit(events.Started(attempt=number, backend="torch", versions={}, device_id="cpu",
        device_name="processor", device_kind="cpu", memory_label="host RAM", platform_lines=()))
    attempt.emit(events.Phase(phase="train", total_steps=100_000, steps_per_epoch=600, parameters=10**6))
    step = 0
    while not attempt.stop_requested:
        time.sleep(0.1)
        step += 1
        attempt.progress("train", step)
        if step % 2:
            continue
        loss = 3 + 5 * math.exp(-step / 900) + 0.05 * math.sin(step * 1.7)
        attempt.emit(events.Step(step=step, epoch=1 + step // 600, loss=loss, learning_rate=5e-4,
            gradient_norm=1 + 0.2 * math.sin(step), tokens=step * 2048,
            tokens_per_second=20000 + 300 * math.sin(step), step_seconds=0.1))
        print(f"step {step:,}/100,000  loss {loss:.4f}  {20000 + step % 7:,} tokens/s", flush=True)
        if step % 10 == 0:
            used = (150 + step % 5) * MIB
            attempt.emit(events.Memory(phase="train", step=step, allocated_bytes=used,
                peak_bytes=171 * MIB, reserved_bytes=None, device_bytes=None, device_total_bytes=16 << 30,
                host_bytes=(590 + step % 3) * MIB, peak_host_bytes=612 * MIB))
        if step % 100 == 0:
            attempt.emit(events.Evaluation(step=step, loss=loss + 0.1, bits_per_byte=1.9, tokens=9999,
                seconds=1.0, metrics={"unigram_loss": 6.5}))
    attempt.emit(events.Stopped(step=step, reason="asked"), durable=True)
    attempt.finish(75, step, "stopped")
sys.exit(75)
"""
MANY = """
import math, sys
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.read.follow import Follower
from memconsole.plan import plan as plans

run = create_run(plans.replace(plans.Plan(), {"device.name": "cpu"}), "long")
log = EventWriter(run.attempt_path(run.new_attempt()))
log.write(events.Phase(phase="train", total_steps=COUNT))
for step in range(1, COUNT + 1):
    log.write(events.Step(step=step, epoch=1, loss=3 + 5 * math.exp(-step / 9e4), learning_rate=5e-4,
        gradient_norm=1.0, tokens=step * 2048, tokens_per_second=20000.0, step_seconds=0.1))
    if step % 50 == 0:
        log.write(events.Memory(phase="train", step=step, allocated_bytes=step << 10, peak_bytes=None,
            reserved_bytes=None, device_bytes=step << 11, device_total_bytes=None, host_bytes=step << 12))
log.close()
Follower(run).save_state()
print(run.id)
"""


@contextmanager
def live_run() -> Iterator[str]:
    """A run that trains, in the present XDG_STATE_HOME. Its id."""
    with tempfile.TemporaryDirectory() as folder:
        story = Story(Path(folder))
        try:
            story.start(script=TRAINER)
            story.wait_training()
            yield story.run.id
        finally:
            end(story.run)


def watching(
    env: Mapping[str, str], seconds: float = WATCH_SECONDS, *options: str, keys: str = ""
) -> tuple[float, float, float]:
    """`used` while a live run is watched, from some seconds after the first paint and `keys`."""
    with live_run() as run, opened(env, "attach", run, *options) as terminal:
        terminal.wait_for(r"step [1-9]")
        terminal.press(*keys)
        time.sleep(6)
        return used(terminal, seconds)


def idle_bytes(env: Mapping[str, str], seconds: float = 10.0) -> int:
    """Bytes sent by a plan screen that nobody touches, once it is priced and asks for nothing."""
    with opened(env) as terminal:
        terminal.wait_for("fits, .* free")
        terminal.press("r")
        terminal.wait_for("no longer asking")
        terminal.rest(8.0, 60)  # till the notice is gone
        before = len(terminal.raw)
        time.sleep(seconds)
        return len(terminal.raw) - before


def toggling(env: Mapping[str, str], presses: int = TOGGLES) -> tuple[list[float], list[int]]:
    """Milliseconds from key to the last cell painted, and bytes, of each of `presses` toggles."""
    times, sizes = [], []
    with opened(env) as terminal:
        terminal.wait_for("fits, .* free")
        terminal.press("2", "2", "2")
        terminal.rest(1.5, 20)
        for n in range(presses):
            before = len(terminal.raw)
            begun = time.perf_counter()
            shift = time.monotonic() - begun
            terminal.send("25"[n % 2])
            while len(terminal.raw) == before and time.perf_counter() - begun < 5:
                time.sleep(0.0005)
            terminal.rest(0.12, 5)
            times.append(1000 * (terminal.heard_at - shift - begun))
            sizes.append(len(terminal.raw) - before)
    return times, sizes


def slow_link(env: Mapping[str, str]) -> tuple[float, float]:
    """Seconds from a key to its effect while a live run is watched over 8 kB/s, and to quit."""
    with live_run() as run, opened(env, "attach", run, bytes_per_second=SLOW_LINK) as terminal:
        terminal.wait_for(r"step [1-9]", 60)
        time.sleep(5)
        begun = time.monotonic()
        terminal.send("o")
        terminal.wait_for("sample text ─", 30)
        effect = time.monotonic() - begun
        time.sleep(2)
        begun = time.monotonic()
        terminal.send("q")
        terminal.wait_for("The run goes on", 60)
        terminal.exit_code()
        return effect, time.monotonic() - begun


def first_paint(env: Mapping[str, str], times: int = 5) -> float:
    """Median seconds from starting the program to the whole plan screen on the terminal, once warm."""
    found = []
    for _ in range(times + 1):
        begun = time.monotonic()
        with opened(env) as terminal:
            while b"optimizations" not in terminal.raw:
                assert time.monotonic() - begun < 30
                time.sleep(0.005)
            found.append(time.monotonic() - begun)
    return statistics.median(found[1:])


def long_run(env: Mapping[str, str], count: int = EVENTS) -> tuple[float, float]:
    """Seconds more than for a run of ten events until a run of `count` events is on screen, and MiB more."""
    results = []
    for events in (10, 10, count):  # the first only warms the disk's cache
        script = MANY.replace("COUNT", str(events))
        made = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        )
        begun = time.monotonic()
        with opened(env, "attach", made.stdout.strip()) as terminal:
            terminal.wait_for(rf"{events:,} step", 60)
            seconds = time.monotonic() - begun
            time.sleep(2)
            rss = psutil.Process(terminal.process.pid).memory_info().rss / 2**20
        results.append((seconds, rss))
    return results[2][0] - results[1][0], results[2][1] - results[1][1]


def figures() -> tuple[dict[str, float], list[Comparison]]:
    """Everything that is printed and stored."""
    with environment() as env:
        paint = first_paint(env)
        times, sizes = toggling(env)
        idle = idle_bytes(env)
        rate, cpu, rss = watching(env)
        slow_rate, _, _ = watching(env, WATCH_SECONDS, "--slow-link")
        effect, leave = slow_link(env)
        attach, growth = long_run(env)
        comparisons = compare(env)
    return {
        "watching_bytes_per_second": rate,
        "slow_watching_bytes_per_second": slow_rate,
        "idle_bytes": idle,
        "toggle_p99_ms": sorted(times)[max(0, int(len(times) * 0.99) - 1)],
        "toggle_median_ms": statistics.median(times),
        "toggle_most_bytes": max(sizes),
        "slow_key_seconds": effect,
        "slow_quit_seconds": leave,
        "first_paint_seconds": paint,
        "rss_mib": rss,
        "cpu_share": cpu,
        "long_run_more_seconds": attach,
        "long_run_more_mib": growth,
    }, comparisons


ROWS: tuple[tuple[str, str, float, Callable[[float], str]], ...] = (
    ("watching a live run, 80x24", "watching_bytes_per_second", 1000, lambda v: f"{v:,.0f} B/s"),
    ("the same with --slow-link", "slow_watching_bytes_per_second", 250, lambda v: f"{v:,.0f} B/s"),
    ("idle plan screen, 10 s", "idle_bytes", 0, lambda v: f"{v:,.0f} B"),
    ("a toggle, p99", "toggle_p99_ms", 50, lambda v: f"{v:.0f} ms"),
    ("a toggle, most bytes", "toggle_most_bytes", 4096, lambda v: f"{v:,.0f} B"),
    ("over 8 kB/s: key to effect", "slow_key_seconds", 0.5, lambda v: f"{v:.2f} s"),
    ("over 8 kB/s: quit", "slow_quit_seconds", 2.0, lambda v: f"{v:.2f} s"),
    ("first paint, warm", "first_paint_seconds", 0.5, lambda v: f"{v:.2f} s"),
    ("resident memory", "rss_mib", 90, lambda v: f"{v:.0f} MiB"),
    ("processor while watching", "cpu_share", 0.03, lambda v: f"{100 * v:.1f} % of a core"),
    ("attach to 10⁶ events: more time", "long_run_more_seconds", 1.0, lambda v: f"{v:.2f} s"),
    ("attach to 10⁶ events: more memory", "long_run_more_mib", 20, lambda v: f"{v:.1f} MiB"),
)  # fmt: skip


def table(found: Mapping[str, float], comparisons: list[Comparison]) -> str:
    """The figures beside the bar, then other monitors on the same terminal."""
    lines = [f"{'':36} {'measured':>16} {'must be at most':>18}"]
    for label, key, most, shown in ROWS:
        value = found[key]
        verdict = "" if value <= most else "  missed"
        lines.append(f"{label:36} {shown(value):>16} {shown(most):>18}{verdict}")
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > cores:
        lines.append(f"times are longer than alone: {busy:.1f} programs wait for {cores} cores")
    lines += ["", *told(comparisons)]
    return "\n".join(lines)


if __name__ == "__main__":
    measured, compared = figures()
    if len(sys.argv) > 1:
        stored = {**measured, "neighbours": [asdict(one) for one in compared]}
        Path(sys.argv[1]).write_text(json.dumps(stored, indent=2) + "\n")
    print(table(measured, compared))
