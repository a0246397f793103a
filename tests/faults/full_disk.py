"""A run on a small disk that somebody else fills twice and keeps full: run inside a mount of its own.

``python full_disk.py FOLDER BACKEND TEXT HOLD_SECONDS``. Prints what happened as JSON on its last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

folder, backend, text, hold = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
os.environ["XDG_STATE_HOME"] = str(folder)
EVERY = 20
"""Steps between two checkpoints."""

from memconsole.plan.plan import Plan, replace
from memconsole.runs.act import launch
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.read.report.report import report
from memconsole.runs.record.checkpoints.manifest import step_of
from memconsole.runs.record.directory import RunError
from memconsole.runs.record.processes import locks
from memconsole.runs.record.processes.heartbeat import Heartbeat, read_heartbeat


@contextmanager
def filled() -> Iterator[None]:
    """Someone else's file takes every free byte, and goes on taking."""
    done = threading.Event()

    def fill(size: int) -> None:
        while size:
            try:
                os.write(descriptor, b"x" * size)
            except OSError:
                size //= 2

    def go_on() -> None:
        while not done.wait(0.02):
            fill(1 << 16)

    path = folder / "someone's data"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    fill(1 << 20)
    filling = threading.Thread(target=go_on)
    filling.start()
    try:
        yield
    finally:
        done.set()
        filling.join()
        os.close(descriptor)
        path.unlink()


def wait(what: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"{liveness(run)} {beat()} {logs()}"
        time.sleep(0.05)


def beat() -> Heartbeat | None:
    return read_heartbeat(run.attempt_path(1))


def step() -> int:
    now = beat()
    return now.step if now else 0


def logs() -> str:
    found = [run.path / "supervisor.log", run.attempt_path(1) / "out.log"]
    return "\n".join(path.read_text()[-2000:] for path in found if path.exists())


def waits() -> bool:
    now = beat()
    return now is not None and now.phase == "wait_disk"


def memconsole(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "memconsole", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout + done.stderr


def held_full(seconds: float) -> int:
    """Wait until the run waits, and for a while more; the step whose state it keeps."""
    wait(waits)
    kept, end = step(), time.monotonic() + seconds
    holders = locks.held(run.path)
    while time.monotonic() < end:
        assert waits(), logs()
        time.sleep(0.1)
    assert locks.held(run.path) == holders
    assert step() == kept
    return kept


settings: dict[str, Any] = {
    "model.target_params": 200_000,
    "data.vocab_size": 300,
    "data.sequence_length": 16,
    "data.source": text,
    "train.batch_size": 4,
    "train.max_steps": 100_000,
    "train.log_every": 1,
    "train.checkpoint_every": EVERY,
    "train.keep_checkpoints": 1,
    "train.sample_tokens": 0,
    "train.preflight": False,
    "device.name": "cpu",
    "backend": backend,
}
run = launch.launch(replace(Plan(), settings))
wait(lambda: step() > EVERY)
with filled():
    first = held_full(hold)
    assert first % EVERY == 0
    words = f"cannot save steps {first - EVERY + 1:,} to {first:,}: the disk of {run.checkpoints_path} is full"
    seen = Follower(run).poll()
    assert (seen.state, seen.facts.phase) == ("running", "wait_disk"), seen
    assert seen.unsaved.startswith(words), seen.unsaved
    assert words in report(run).verdict.evidence
    listed = memconsole("runs")
    assert "cannot save" in listed.splitlines()[1], listed
    assert words in listed, listed
wait(lambda: step() > first + EVERY)
with filled():
    second = held_full(hold)
    asked = subprocess.Popen(
        [sys.executable, "-m", "memconsole", "stop", run.id, "--yes"],
        stdout=subprocess.PIPE,
        text=True,
    )
    wait(lambda: liveness(run).state == "stopping")
    assert held_full(min(hold, 3.0)) == second
    assert asked.poll() is None
said = asked.communicate(timeout=60)[0]
assert f"to {second:,}: the disk of " in said, said
assert "It stops once they are saved" in said, said
(last,) = (step_of(path) for path in run.committed_checkpoints())
assert f"stopped at step {last:,}" in said, said
assert last in (second, second + 1), "the step under way is finished"
with filled():
    with pytest.raises(
        RunError, match=r"cannot be started.*No space left on device; free some room"
    ):
        launch.resume(run)
    assert liveness(run).state == "stopped"
    assert run.attempt_numbers() == [1]
made = report(run)
assert [line.step for line in made.steps] == list(range(1, last + 1)), "a step is not told"
manifest = json.loads((run.committed_checkpoints()[-1] / "MANIFEST.json").read_text())
hashes = {n: e["sha256"] for n, e in manifest["files"].items() if n.endswith(".safetensors")}
print(json.dumps({"plan": run.plan_path.read_text(), "step": last, "hashes": hashes}))
