"""A full disk loses no last words and no rare record, and the run goes on once there is room."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memconsole.plan import plan_file
from memconsole.runs.record.run_store import create_run
from tests.training.harness.runs import attempt, state_hashes

INSIDE = """
import os, sys
from pathlib import Path
os.environ["XDG_STATE_HOME"] = sys.argv[1]
from memconsole.plan.plan import Plan
from memconsole.runs.record import files
from memconsole.runs.record.log import events
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record.run_store import create_run
from memconsole.runs.record.log.eventreader import EventReader
from memconsole.runs.record.records import ErrorRecord, FinalRecord

def step(n):
    return events.Step(step=n, epoch=1, loss=1.0, learning_rate=1.0, gradient_norm=None, tokens=n,
                       tokens_per_second=1.0, step_seconds=1.0)

def fill(path):
    size = 1 << 20
    with open(path, "wb", buffering=0) as file:
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2

run = create_run(Plan())
run.new_attempt()
try:
    with Attempt(run, 1) as attempt:
        attempt.emit(step(1))
        assert run.reserve_path.exists()
        fill(Path(sys.argv[1]) / "someone's data")
        n = 1
        while run.reserve_path.exists():
            n += 1
            assert n < 100_000
            attempt.emit(step(n))
        print("reserve given up at", n)
        fill(Path(sys.argv[1]) / "more data")
        lost = n + 1
        for k in range(2000):
            attempt.emit(step(n + 1 + k))
        attempt.emit(events.Phase(phase="checkpoint"), durable=True)
        (Path(sys.argv[1]) / "more data").unlink()
        attempt.emit(step(10**6))
        raise OSError(28, "No space left on device")
except OSError:
    pass
error = files.read_struct(run.attempt_path(1) / "error.json", ErrorRecord)
assert error.cause == "disk", error
reader = EventReader(run.attempt_path(1))
records = reader.read()
steps = [r.step for r in records if isinstance(r, events.Step)]
assert steps[:n] == list(range(1, n + 1))
assert steps[-1] == 10**6
assert reader.missing > 0
assert len(steps) + reader.missing == n + 2001
assert sum(isinstance(r, events.Phase) for r in records) == 1
assert any("could not be written" in r.message for r in records if isinstance(r, events.Warning))
assert isinstance(records[-1], events.Error)
print("held")
"""


BEGINNING = """
import os, sys, time
from pathlib import Path
from memconsole.plan.plan import Plan, replace
from memconsole.runs.act import launch
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record.directory import RunError
from memconsole.runs.record.run_store import list_runs
from memconsole.runs.record.processes.heartbeat import read_heartbeat
from memconsole.runs.record.records import OUTPUT

disk, data = Path(sys.argv[1]), Path(sys.argv[2])
os.environ["XDG_STATE_HOME"] = str(disk)

def fill(path, left):
    size = 1 << 20
    with open(path, "wb", buffering=0) as file:
        while size:
            if os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize < left + size:
                size //= 2
                continue
            file.write(b"x" * size)

settings = {
    "model.target_params": 200_000,
    "data.vocab_size": 300,
    "data.sequence_length": 16,
    "data.source": str(data),
    "device.name": "cpu",
}
plan = replace(Plan(), settings)
fill(disk / "someone's data", 1 << 16)
try:
    launch.launch(plan)
except RunError as error:
    print(error)
assert list_runs() == []
(disk / "someone's data").unlink()
run = launch.launch(plan)
fill(disk / "someone's data", 0)
deadline = time.monotonic() + 200
while liveness(run).live:
    assert time.monotonic() < deadline, liveness(run)
    time.sleep(0.1)
assert read_heartbeat(run.attempt_path(1)) is not None
now = liveness(run)
print(now.state, now.verdict.reason, now.verdict.evidence)
print((run.attempt_path(1) / OUTPUT).read_text())
"""


TABLE = """
import os, sys
os.environ["HF_DATASETS_CACHE"] = sys.argv[1]
from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.failures.failure import cause_of
from memconsole_trainer.data.sources.opening import open_source

plan = replace(Plan(), {"data.source": sys.argv[2]})
try:
    open_source(plan, 256)
except Exception as error:
    print(cause_of(error), error)
"""


MINUTE = pytest.param(60.0, marks=pytest.mark.slow, id="a minute")


def on_a_small_disk(folder: Path, mebibytes: int, *command: str) -> str:
    """What a command prints that runs with a full-able disk of its own, mounted on `folder`."""
    mount = f'mount -t tmpfs -o size={mebibytes}m,mode=0700 tmpfs {folder} && exec "$@"'
    inside = [
        "unshare",
        "-Urm",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        mount,
        "sh",
    ]
    try:
        able = subprocess.run([*inside, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("needs a user namespace to mount a small file system")
    done = subprocess.run(
        [*inside, sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_keeps_last_words_and_counts_what_is_lost(tmp_path: Path) -> None:
    assert on_a_small_disk(tmp_path, 2, "-c", INSIDE, str(tmp_path)).endswith("held\n")


def test_a_run_whose_disk_is_full_before_its_first_step_is_refused_or_fails_and_names_the_file(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    disk, data = tmp_path / "disk", tmp_path / "text.txt"
    disk.mkdir()
    data.write_text("the cat sat on the mat while dogs ran over hills " * 2_000)
    output = on_a_small_disk(disk, 4, "-P", "-c", BEGINNING, str(disk), str(data))
    refused, ended, *said = output.splitlines()
    full = "cannot be written: No space left on device; free some room there"
    assert refused.endswith(full)
    assert ended.startswith("failed disk_full ")
    assert ended.endswith(f"tokenizer_config.json {full} (exit code 79)")
    assert any(line.startswith("memconsole: ") and line.endswith(full) for line in said), said
    assert "Traceback" not in output


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_a_full_disk_is_not_taken_for_a_table_that_cannot_be_read(
    name: str, tmp_path: Path
) -> None:
    disk, data = tmp_path / "disk", tmp_path / name
    disk.mkdir()
    words = "the cat sat on the mat while dogs ran over hills " * 1_000
    rows = [{"text": f"{number} {words}"} for number in range(60)]
    if name == "rows.csv":
        data.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    else:
        data.write_text(json.dumps(rows))
    output = on_a_small_disk(disk, 1, "-P", "-c", TABLE, str(disk / "tables"), str(data))
    assert output == f"disk {data}: no room for its table in {disk}/tables; free some there\n"


@pytest.mark.parametrize("hold", [pytest.param(1.0, id="a second"), MINUTE])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_run_on_a_disk_that_is_filled_twice_waits_and_loses_no_step(
    backend: str, hold: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)
    disk, text = tmp_path / "disk", tmp_path / "text"
    disk.mkdir()
    text.mkdir()
    (text / "a.txt").write_text("the cat sat on the mat while dogs ran over hills " * 20_000)
    story = Path(__file__).with_name("full_disk.py")
    output = on_a_small_disk(disk, 40, "-P", str(story), str(disk), backend, str(text), str(hold))
    told = json.loads(output.splitlines()[-1])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    whole = create_run(plan_file.loads(told["plan"]))
    assert attempt(whole, lambda phase, step: step >= told["step"]) == 75
    assert state_hashes(whole) == told["hashes"]
