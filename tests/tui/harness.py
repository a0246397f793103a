"""Values and a console for the screens' tests: constructed readings and snapshots, real pricing."""

from __future__ import annotations

import math
import time
from typing import Any

from memconsole.devices.reading import DeviceReading, Devices, Missing, Process
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.plan.plan import Plan
from memconsole.plan.plan import replace as replaced
from memconsole.runs.read.curves.curve import Curve, GaugeCurves
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.state.facts import RunFacts
from memconsole.runs.read.state.ranks import RankFacts
from memconsole.runs.record.log import events
from memconsole.runs.record.states import Verdict
from memconsole.tui.app.console import ConsoleApp
from memconsole.tui.app.messages import SnapshotArrived

GIB = 2**30


def cpu_reading(**changes: Any) -> DeviceReading:
    """A processor with 16 GiB, 10 of them free."""
    values: dict[str, Any] = {
        "id": "cpu",
        "name": "Test CPU",
        "kind": "cpu",
        "memory_label": "host RAM",
        "total_bytes": 16 * GIB,
        "used_bytes": 6 * GIB,
        "free_bytes": 10 * GIB,
        "utilization_percent": 12.0,
        "temperature_celsius": Missing("no sensor"),
        "power_watts": Missing("no sensor"),
        "processes": (Process(pid=42, name="python", used_bytes=GIB),),
        "source": "psutil",
    }
    return DeviceReading(**(values | changes))


def readings(count: int = 0, **changes: Any) -> Devices:
    """The processor and `count` GPUs."""
    gpus = tuple(
        cpu_reading(
            id=f"cuda:{n}",
            name=f"GPU {n}",
            kind="gpu",
            memory_label="VRAM",
            total_bytes=24 * GIB,
            **changes,
        )
        for n in range(count)
    )
    return Devices(devices=(cpu_reading(**changes), *gpus), notes=("AMD: no amdgpu device",))


def snapshot(step: int = 340, total: int = 1200, **changes: Any) -> RunSnapshot:
    """A run of 1,200 steps at `step`."""
    steps = tuple(range(10, step + 1, 10))
    losses = tuple(3.0 + 5.0 * math.exp(-s / 150) for s in steps)
    evaluated = tuple(
        events.Evaluation(
            step=s,
            loss=3.2 + 5.0 * math.exp(-s / 150),
            bits_per_byte=1.9,
            tokens=5000,
            seconds=2.0,
            metrics={"unigram_loss": 5.712},
        )
        for s in range(100, step + 1, 100)
    )
    values: dict[str, Any] = {
        "id": "20251121-014233-k3x2ab",
        "name": "my stories",
        "state": "running",
        "plan": Plan(),
        "attempt": 1,
        "created_wall": 1.0,
        "started": events.Started(
            attempt=1,
            backend="torch",
            versions={},
            device_id="cpu",
            device_name="Test CPU",
            device_kind="cpu",
            memory_label="host RAM",
            platform_lines=("platform: cpu",),
        ),
        "phase": "train",
        "parameters": 1_000_064,
        "step": step,
        "total_steps": total,
        "steps_per_epoch": 400,
        "epoch": step // 400 + 1,
        "tokens": step * 2048,
        "tokens_per_second": 5230.0,
        "step_seconds": 0.39,
        "learning_rate": 4.3e-4,
        "gradient_norm": 0.8,
        "loss": losses[-1] if losses else None,
        "eta_seconds": 325.0,
        "pace_seconds": 0.39,
        "steps_done": float(step),
        "elapsed_seconds": 180.0,
        "recent_train": Curve(steps[-10:], losses[-10:]),
        "train": Curve(steps, losses),
        "validation": Curve(
            tuple(e.step for e in evaluated), tuple(e.loss or 0.0 for e in evaluated)
        ),
        "epochs": tuple(
            events.Epoch(epoch=n + 1, train_loss=5.1 - n, validation_loss=5.2 - n, minutes=1.25)
            for n in range(step // 400)
        ),
        "evaluations": evaluated,
        "memory": events.Memory(
            phase="train",
            step=step,
            allocated_bytes=151 << 20,
            peak_bytes=171 << 20,
            reserved_bytes=None,
            device_bytes=None,
            device_total_bytes=16 * GIB,
            host_bytes=590 << 20,
            peak_host_bytes=612 << 20,
        ),
        "gauges": GaugeCurves(
            allocated=Curve(steps, tuple(float((165 + s % 7) << 20) for s in steps)),
            host=Curve(steps, tuple(float((590 - s % 9) << 20) for s in steps)),
        ),
        "peak_bytes": 171 << 20,
        "peak_host_bytes": 612 << 20,
        "sample": events.Sample(step=300, prompt="def main(", text="self):\n    return 1\n"),
        "log_tail": tuple(f"step {s} loss {v:.3f}" for s, v in zip(steps, losses, strict=True)),
    }
    values |= changes
    told = {name: values.pop(name) for name in RunFacts.__struct_fields__ if name in values}
    return RunSnapshot(facts=RunFacts(**told), **values)


def with_ranks(count: int, **changes: Any) -> RunSnapshot:
    """A run on so many GPUs, whose last rank is slow and whose second one is the fullest."""
    held = [(500 + 40 * (5 * n % 7) + (400 if n == 1 else 0)) << 20 for n in range(count)]
    ranks = tuple(
        RankFacts(
            reading=events.RankReading(
                rank=n,
                step=820,
                allocated_bytes=size - (100 << 20),
                peak_bytes=size,
                device_bytes=size + (300 << 20),
                peak_device_bytes=size + (300 << 20),
                host_bytes=3 * GIB,
                peak_host_bytes=3 * GIB,
                step_seconds=0.39,
                exchange_seconds=0.02 if n == count - 1 else 0.09,
            )
        )
        for n, size in enumerate(held)
    )
    values: dict[str, Any] = {
        "plan": replaced(
            Plan(),
            {"device.name": "rtx-4090", "device.count": count, "optimize.sharding": "fsdp"},
        ),
        "started": events.Started(
            attempt=1,
            backend="torch",
            versions={},
            device_id="cuda:0",
            device_name="GPU 0",
            device_kind="gpu",
            memory_label="VRAM",
            platform_lines=("platform: gpu",),
            ranks=count,
        ),
        "rank_count": count,
        "ranks": ranks,
        "memory": events.Memory(
            phase="train",
            step=820,
            allocated_bytes=held[0] - (100 << 20),
            peak_bytes=held[0],
            reserved_bytes=held[0],
            device_bytes=held[0] + (300 << 20),
            device_total_bytes=24 * GIB,
            host_bytes=3 * GIB,
        ),
        "peak_bytes": max(held),
        "peak_device_bytes": max(held) + (300 << 20),
        "peak_host_bytes": 3 * GIB,
    }
    return snapshot(820, **(values | changes))


def finished(**changes: Any) -> RunSnapshot:
    """The same run at its end."""
    values: dict[str, Any] = {
        "state": "finished",
        "verdict": Verdict(reason="finished", evidence="the trainer wrote final.json"),
        "ended": events.Ended(
            step=1200,
            best_validation_loss=3.202,
            final_validation_loss=3.202,
            final_train_loss=3.214,
            total_minutes=4.1,
            average_epoch_minutes=1.25,
            epochs=3,
        ),
    }
    return snapshot(1200, **(values | changes))


class Console(ConsoleApp):
    """The console with constructed readings in place of the probe's process, and no tracer of its own."""

    readings: Devices | None = readings()
    asked: list[tuple[str, str]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked = []

    def _start_probe(self) -> None:
        if self.readings is not None:
            self.set_devices(self.readings)

    def open_book(self) -> ExactBook | None:
        return self.book

    def request(self, run_id: str, what: str) -> Any:
        self.asked.append((run_id, what))


def screen_lines(app: ConsoleApp) -> list[str]:
    """What is on screen, row by row."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips]


def screen_text(app: ConsoleApp) -> str:
    """What is on screen."""
    return "\n".join(screen_lines(app))


async def settle(pilot: Any) -> None:
    """Wait until nothing is being priced or drawn. The follower of a run is not waited for."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        await pilot.pause()
        groups = {w.group for w in pilot.app.workers if not w.is_finished}
        if not groups - {"follow"}:
            break
        await pilot.pause(0.02)
    await pilot.pause()


async def show_run(app: ConsoleApp, pilot: Any, run: RunSnapshot) -> None:
    """Put a snapshot on the run screen as the follower does."""
    app.run_id = run.id
    app.post_message(SnapshotArrived(run))
    await settle(pilot)
    await app.action_show_run()
    await settle(pilot)


async def paste(pilot: Any, text: str) -> None:
    """Text as a bracketed paste."""
    from textual import events as textual_events

    pilot.app.post_message(textual_events.Paste(text))
    await settle(pilot)
