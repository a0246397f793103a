"""A trainer that runs out of memory says so, with what it held and asked for, and keeps its checkpoints."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.runs.act.control import request
from memconsole.runs.act.launch import resume
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.read.report.receipt import Receipt
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.states import LIVE
from memconsole.start import start

MIB = 2**20
BACKENDS = ["torch", "jax"]
Launch = Callable[..., RunDirectory]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Starts a small plan in a place for runs of its own; ends whatever it started."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text").mkdir()
    for n in range(12):
        (tmp_path / "text" / f"{n}.txt").write_text(
            f"the cat {n} sat on a mat while dogs ran. " * 90
        )
    started = []

    def launch_plan(backend: str, allowed_bytes: int | None = None, **changes: Any) -> RunDirectory:
        settings = {
            "backend": backend, "data.source": str(tmp_path / "text"), "data.vocab_size": 1024,
            "model.target_params": 1_000_000, "data.sequence_length": 64, "train.batch_size": 32,
            "train.max_steps": 100_000, "train.epochs": 1_000, "train.sample_tokens": 4,
            "train.log_every": 1, "device.name": "cpu",
        } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
        if allowed_bytes is not None:
            settings["device.memory_fraction"] = allowed_bytes / psutil.virtual_memory().total
        started.append(start(replace(Plan(), settings), None, None))
        return started[-1]

    yield launch_plan
    for run in started:
        if liveness(run).live:
            try:
                request(run, "kill", "test")
            except RunError:
                continue


def wait(run: RunDirectory, until: Callable[[RunSnapshot], bool]) -> RunSnapshot:
    follower, deadline = Follower(run), time.monotonic() + 150
    while not until(seen := follower.poll()):
        assert time.monotonic() < deadline, (seen.state, seen.verdict, seen.log_tail)
        time.sleep(0.1)
    return seen


def least_mapped(pid: int) -> int:
    """Bytes that a process has mapped between its steps: small things still fit, a step does not."""
    found = []
    for _ in range(200):
        status = Path(f"/proc/{pid}/status").read_text()
        found.append(int(status.split("VmData:")[1].split()[0]) * 1024)
        time.sleep(0.005)
    return min(found)


def ended(run: RunDirectory) -> RunSnapshot:
    return wait(run, lambda seen: seen.state not in LIVE)


def receipt_of(run: RunDirectory) -> Receipt:
    """Written by the supervisor a moment after the trainer has ended."""
    deadline = time.monotonic() + 60
    while (found := files.read_struct(run.receipt_path, Receipt)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_needs_more_than_the_plan_allows_ends_with_what_it_lacked(
    launch: Launch, backend: str
) -> None:
    pytest.importorskip(backend)
    run = launch(backend, allowed_bytes=60 * MIB, train__batch_size=128)
    seen = ended(run)
    assert seen.verdict is not None
    assert seen.verdict.reason == "out_of_memory", seen.verdict
    assert "asked for" in seen.verdict.evidence
    receipt = receipt_of(run)
    lacked = receipt.shortfall
    assert lacked is not None
    # The thread that reads data may meet the limit first: its library then ends the process, and there is no error to
    # read. XLA's libraries do not say how much they asked for: YNNPACK for reductions and Eigen for products, which may
    # also end the process.
    error = seen.facts.error
    if error is not None and not any(word in error.message for word in ("YNNPACK", "bad_alloc")):
        assert lacked.requested_bytes is not None
        assert lacked.requested_bytes > MIB
        assert lacked.needed_bytes > 60 * MIB
    assert receipt.estimate is not None
    assert lacked.needed_bytes < 1.2 * receipt.estimate.table.peak_bytes, "a bound, not a guess"
    assert all(row.at_least for row in receipt.comparison if row.measured_bytes is not None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_larger_than_the_plan_allows_is_told_before_the_first_step(
    launch: Launch, backend: str
) -> None:
    pytest.importorskip(backend)
    seen = ended(launch(backend, allowed_bytes=5 * MIB))
    assert seen.verdict is not None
    assert (seen.verdict.reason, seen.facts.step) == ("out_of_memory", 0), seen.verdict
    assert "device.memory_fraction" in seen.verdict.evidence


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_that_runs_out_late_leaves_the_last_checkpoint_to_resume_from(
    launch: Launch, backend: str
) -> None:
    pytest.importorskip(backend)
    # A fast heap keeps all that a step needs, so that nothing grows any more.
    run = launch(backend, train__checkpoint_every=5, optimize__heap="tight")
    wait(run, lambda seen: seen.facts.checkpoint is not None and seen.facts.checkpoint.step >= 5)
    number = run.newest_attempt()
    record = run.attempt_record(number or 0)
    assert record is not None
    assert record.trainer is not None
    allowed = least_mapped(record.trainer.pid) + MIB
    resource.prlimit(record.trainer.pid, resource.RLIMIT_DATA, (allowed, resource.RLIM_INFINITY))
    seen = ended(run)
    assert seen.verdict is not None
    assert seen.verdict.reason == "out_of_memory", seen.verdict
    assert seen.verdict.resumable
    saved = run.committed_checkpoints()[-1]
    step = int(saved.name.removeprefix("step-"))
    assert step >= 5
    resume(run)
    wait(run, lambda seen: seen.attempt == 2 and seen.facts.step > step and seen.state == "running")
