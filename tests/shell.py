"""The commands as a person at a shell runs them, and waiting for what the runs they start have done."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from memconsole.runs.read.follow import Follower
from memconsole.runs.record.directory import RunDirectory
from tests.faults.run_story import end

COMMAND = (sys.executable, "-m", "memconsole")


def memconsole(env: Mapping[str, str], *arguments: str, code: int | None = 0) -> str:
    """What a command prints; its exit code must be `code`, unless that is none."""
    done = subprocess.run(
        [*COMMAND, *arguments], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout


def end_runs(env: Mapping[str, str]) -> None:
    """Kill every process of the runs that commands have started in `env`."""
    for plan in Path(env["XDG_STATE_HOME"]).glob("memconsole/runs/*/plan.toml"):
        end(RunDirectory(plan.parent))


def wait_for_step(env: Mapping[str, str], run: str, step: int, seconds: float = 120) -> int:
    """The step that a run has reached, once that is at least `step`; it must not end before."""
    follower = Follower(RunDirectory(Path(env["XDG_STATE_HOME"]) / "memconsole" / "runs" / run))
    end = time.monotonic() + seconds
    while (seen := follower.poll()).facts.step < step:
        assert seen.state in ("starting", "running"), seen
        assert time.monotonic() < end, f"{run} did not reach step {step}: {seen}"
        time.sleep(0.1)
    return seen.facts.step
