"""A run whose trainer is a small script, with a real supervisor and real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from memconsole.plan import plan as plans
from memconsole.runs.act import family, launch
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes import locks
from memconsole.runs.record.run_store import create_run

SUPERVISE = """
import sys
from memconsole.runs.act.supervise import supervisor
script = sys.argv.pop(1)
sys.exit(supervisor.main(command=lambda run, n: [sys.executable, "-P", script, str(run.path), str(n)]))
"""

TRAINER = """
import os, sys, time
from pathlib import Path
from memconsole.runs.record.log import events
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record.directory import RunDirectory

run, number = RunDirectory(Path(sys.argv[1])), int(sys.argv[2])
print("trainer output", flush=True)
with Attempt(run, number) as attempt:
    step = 0
    while not attempt.stop_requested:
        step += 1
        attempt.progress("train", step)
        attempt.emit(events.Step(step=step, epoch=1, loss=1.0 / step, learning_rate=1e-3,
            gradient_norm=1.0, tokens=step, tokens_per_second=100.0, step_seconds=0.01))
        time.sleep(0.01)
        EACH_STEP
    attempt.progress("checkpoint", step)
    (run.checkpoints_path / f"step-{step}").mkdir(exist_ok=True)
    attempt.emit(events.Stopped(step=step, reason="asked"), durable=True)
    attempt.finish(75, step, "stopped", f"step-{step}")
sys.exit(75)
"""


class Story:
    """A run under test, and ways to wait for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = create_run(plans.replace(plans.Plan(), {"device.name": "cpu"}), "a test")

    def start(self, each_step: str = "pass", script: str | None = None) -> None:
        """Start the next attempt with a trainer that does `each_step` in its loop."""
        path = self.folder / "trainer.py"
        path.write_text(script or TRAINER.replace("EACH_STEP", each_step))
        mode = "--resume" if self.run.newest_attempt() else "--start"
        launch.start_supervisor(
            self.run, mode, command=[sys.executable, "-P", "-c", SUPERVISE, str(path)]
        )

    def wait(self, what: Callable[[], object], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (
                f"waited in vain; {liveness(self.run)}; {self.said()}"
            )
            time.sleep(0.01)

    def wait_training(self) -> None:
        self.wait(lambda: self.state == "running" and self.step > 0)

    def said(self) -> str:
        logs = [*self.run.path.glob("supervisor.log"), *self.run.attempts_path.glob("*/out.log")]
        return "\\n".join(log.read_text() for log in logs)

    @property
    def state(self) -> str:
        return liveness(self.run).state

    @property
    def step(self) -> int:
        from memconsole.runs.record.processes.heartbeat import read_heartbeat

        number = self.run.newest_attempt()
        beat = read_heartbeat(self.run.attempt_path(number)) if number else None
        return beat.step if beat else 0

    @property
    def trainer(self) -> int:
        pid = locks.holder(self.run.trainer_lock)
        assert pid
        return pid

    @property
    def supervisor(self) -> int:
        pid = liveness(self.run).supervisor_pid
        assert pid
        return pid


def end(run: RunDirectory) -> None:
    """Kill every process of a run, by its marker and by its locks."""
    held = locks.held(run.path)
    for pid in (held.supervisor, held.trainer):
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    family.kill_members(run.id)
