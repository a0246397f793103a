"""Runs of several processes: which failure counts, when a run begins again, and with how many rows it goes on."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memconsole.plan import catalog
from memconsole.plan.plan import Plan, PlanError, get, replace
from memconsole.plan.processes import processes
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole.plan.training.resuming import EVALUATED, changed, words
from memconsole.runs.act.supervise import again
from memconsole.runs.act.trainer.attempt import STOP_SIGNALS, STOPPING, Attempt
from memconsole.runs.act.trainer.member import Member
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.read.life.verdict import verdict
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures import failed_process
from memconsole.runs.record.processes import locks
from memconsole.runs.record.records import ErrorRecord, FinalRecord
from memconsole.runs.record.run_store import create_run
from memconsole.runs.record.states import Verdict
from memconsole_trainer import stopping
from memconsole_trainer.loop.fingerprint import fingerprint

TWO = {"device.count": 2, "optimize.sharding": "fsdp", "train.batch_size": 6}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return create_run(replace(Plan(), TWO), None, {})


def ended(reason: str, number: str | None = None) -> Verdict:
    return Verdict(reason=reason, evidence="", signal=number)


def test_a_run_begins_again_three_times_from_one_checkpoint(run: RunDirectory) -> None:
    killed = ended("killed", "SIGKILL")
    assert again.is_several(run)
    assert [again.begins_again(run, killed) for _ in range(4)] == [True, True, True, False]
    (run.checkpoints_path / "step-000000007").mkdir(parents=True)
    assert again.begins_again(run, killed)


@pytest.mark.parametrize(
    "verdict", [ended("crashed"), ended("bad_data", "SIGTERM"), ended("finished")]
)
def test_what_would_fail_again_does_not_begin_again(run: RunDirectory, verdict: Verdict) -> None:
    assert not again.begins_again(run, verdict)


@pytest.mark.parametrize(
    ("plan", "begins"),
    [('backend = "torch"\n', False), ('backend = "jax"\n[device]\ncount = 8\n', True)],
)
def test_a_run_of_one_process_begins_again_if_it_has_several_devices(
    run: RunDirectory, plan: str, begins: bool
) -> None:
    files.write_atomic(run.plan_path, plan.encode())
    assert not again.is_several(run)
    assert again.begins_again(run, ended("killed", "SIGKILL")) is begins


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        (
            [(1, 100), (-9, 101)],
            (1, -9),
        ),  # the one that was killed, not the one that lost touch with it
        ([(-9, 130), (77, 100)], (1, 77)),  # the agent kills what does not end
        ([(3, 100)], (0, 3)),
    ],
)
def test_the_failure_that_the_others_followed_from_counts(
    ends: list[tuple[int, int]], first: tuple[int, int]
) -> None:
    launching = pytest.importorskip("memconsole_torch.launching")
    failures: Any = {
        rank: SimpleNamespace(exitcode=code, timestamp=at) for rank, (code, at) in enumerate(ends)
    }
    assert launching.first_of(failures) == first


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ([-6, -9], (1, -9)),  # JAX aborts a process that loses touch with the one that was killed
        ([-6, 77], (1, 77)),  # or with the one that failed by an error of its own
        ([1, -9], (1, -9)),
        ([-6, -6], (0, -6)),  # a node that is silent
    ],
)
def test_of_jax_processes_that_end_together_the_cause_counts(
    codes: list[int], first: tuple[int, int]
) -> None:
    launching = pytest.importorskip("memconsole_jax.launching")
    assert launching.first_of(dict(enumerate(codes))) == first


def _started(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, count: int = 3) -> int:
    """The exit code of `count` JAX processes that run `code`."""
    launching = pytest.importorskip("memconsole_jax.launching")
    monkeypatch.setattr(launching, "pass_on", lambda stopping, watch: None)
    found: int = launching.launch(count, ["-c", code], folder / "processes", folder / "stopping")
    return found


def test_a_killed_jax_process_ends_those_that_would_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import os, signal, time
print(os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "1" else time.sleep(1000)
"""
    assert _started(tmp_path, monkeypatch, code) == -signal.SIGKILL
    folder = tmp_path / "processes"
    assert (folder / "1.log").read_text() == "1 3\n"
    assert failed_process.kept(folder) == failed_process.FailedProcess(rank=1, signal=9)


def test_a_process_that_was_killed_unwatched_is_named(run: RunDirectory) -> None:
    number = run.new_attempt()
    path = run.attempt_path(number)
    files.write_struct(path / "final.json", FinalRecord(exit_code=1, step=3, reason="crashed"))
    assert liveness(run).verdict == verdict(run, number)
    assert verdict(run, number).reason == "crashed"
    (path / "processes").mkdir()
    failed_process.keep(path / "processes", 2, 1)
    assert verdict(run, number).reason == "crashed"
    failed_process.keep(path / "processes", 1, -signal.SIGKILL)
    (path / "final.json").unlink()
    now = liveness(run)
    assert now.verdict is not None
    assert (now.state, now.verdict.reason, now.verdict.signal) == ("failed", "killed", "SIGKILL")
    assert now.verdict.evidence.startswith("process 1 was killed: SIGKILL")


def test_jax_processes_that_end_well_end_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; assert os.environ['MEMCONSOLE_COORDINATOR'].startswith('127.0.0.1:')"
    assert _started(tmp_path, monkeypatch, code) == 0


def test_a_jax_process_that_cannot_reach_the_first_one_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process_group = pytest.importorskip("memconsole_jax.process_group")
    monkeypatch.setattr(process_group, "RENDEZVOUS_SECONDS", 0)
    with pytest.raises(process_group.RendezvousError, match=r"127\.0\.0\.1:1 .* MASTER_ADDR names"):
        process_group._wait_for_coordinator("127.0.0.1:1")


def test_jax_has_a_process_for_each_node_and_torch_for_each_device() -> None:
    four = {"device.count": 4, "launch.devices_per_node": 2, "optimize.sharding": "fsdp"}
    jax = replace(Plan(), {**four, "backend": "jax"})
    assert processes(replace(jax, {"launch.on": "slurm", "device.name": "h100-80gb"})) == 2
    assert processes(replace(jax, {"device.name": "cpu"})) == 2
    assert processes(replace(jax, {"device.name": "cuda:0"})) == 1  # all cards of this machine
    assert processes(replace(jax, {"launch.devices_per_node": None, "device.name": "cpu"})) == 1
    assert processes(replace(Plan(), four)) == 4
    with pytest.raises(PlanError, match=r"expected a multiple of launch\.devices_per_node = 3"):
        check_trainable(replace(jax, {"device.name": "cpu", "launch.devices_per_node": 3}))


def test_a_member_holds_the_gang_and_writes_only_why_it_failed(run: RunDirectory) -> None:
    number = run.new_attempt()
    with Member(run, number, 1) as member:
        assert locks.gang_held(run.gang_lock)
        assert locks.holder(run.trainer_lock) is None
        member.report(ValueError("no such row"))
        member.report(ValueError("a later one"))
        member.finish(1, 3, "crashed")
    assert not locks.gang_held(run.gang_lock)
    found = files.read_struct(run.attempt_path(number) / "error.json", ErrorRecord)
    assert found is not None
    assert found.message == "process 1: no such row"
    names = {p.name for p in run.attempt_path(number).iterdir()}
    assert names == {"error.json", "stacks-1.log"}


def test_the_leader_tells_what_another_process_failed_of(run: RunDirectory) -> None:
    number = run.new_attempt()
    leader = Attempt(run, number)
    leader.shared = True
    with leader, Member(run, number, 1) as member:
        member.report(MemoryError("out of memory"))
        assert leader.report(RuntimeError("connection closed by peer")) == "out_of_memory"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_stop_is_passed_on(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Path] = []
    monkeypatch.setattr(stopping, "_stop_children", lambda: stopped.append(tmp_path))
    before = {each: signal.getsignal(each) for each in (*STOP_SIGNALS, signal.SIGHUP)}
    try:
        stopping.pass_on(tmp_path / "stopping", watch=False)
        signal.raise_signal(number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert stopped
    assert (tmp_path / "stopping").exists()


def test_several_processes_stop_when_they_agree(run: RunDirectory) -> None:
    number = run.new_attempt()
    with Member(run, number, 1) as member:
        signal.raise_signal(signal.SIGTERM)
        assert member.asked
        assert not member.stop_requested
    (run.attempt_path(number) / STOPPING).touch()
    with Member(run, number, 1) as late:
        assert late.asked


@pytest.mark.parametrize(("count", "batch", "steps"), [(1, 6, 2), (3, 4, 1), (4, 3, 1), (12, 1, 1)])
def test_a_run_on_other_devices_keeps_the_rows_of_a_step(
    count: int, batch: int, steps: int
) -> None:
    before = replace(Plan(), TWO)
    after = changed(before, {"device.count": count})
    assert (after.train.batch_size, after.optimize.accumulation_steps) == (batch, steps)
    assert after.effective_batch == before.effective_batch == 12
    assert after.optimize.sharding == ("none" if count == 1 else "fsdp")
    assert f"device.count 2 → {count}" in words(before, after)
    model = catalog.model(before)
    assert fingerprint(after, model) == fingerprint(before, model)
    other = replace(after, {"train.batch_size": batch + 1})
    assert fingerprint(other, model) != fingerprint(before, model)


ODD = {"train.evaluation_batches": 0, "train.evaluation_train_batches": 3}


@pytest.mark.parametrize(
    ("count", "more", "rows"),
    [
        (1, {}, (4, 4, None)),
        (4, {"optimize.accumulation_steps": 2}, (4, 4, None)),
        (3, {"train.batch_size": 6}, (4, 4, None)),
        (4, {"optimize.accumulation_steps": 2, **ODD}, (0, 3, None)),
        (4, {"optimize.accumulation_steps": 2, "train.evaluation_batch_size": 2, **ODD}, (0, 3, 1)),
        (3, {"train.batch_size": 3, "train.evaluation_batch_size": 2}, (5, 5, 1)),  # 15 of 16
        (1, {"train.evaluation_batch_size": 3, "train.evaluation_batches": 1}, (2, 8, None)),
    ],
)
def test_a_run_on_other_devices_keeps_the_rows_of_an_evaluation(
    count: int, more: dict[str, object], rows: tuple[int, int, int | None]
) -> None:
    sizes = {"train.batch_size": 2, "train.evaluation_batches": 4}
    before = replace(Plan(), {**TWO, **sizes, **more})
    after = changed(before, {"device.count": count})
    own = before.train.evaluation_batch_size
    expected = (*rows[:2], rows[2] or own)
    assert tuple(get(after, key) for key in EVALUATED) == expected
    if rows != (5, 5, 1):
        assert rows_evaluated(after) == rows_evaluated(before)
    told = words(before, after)
    assert ("evaluation_train_batches" in told) == (
        rows[1] != before.train.evaluation_train_batches
    )
    model = catalog.model(before)
    assert fingerprint(after, model) == fingerprint(before, model)


def rows_evaluated(plan: Plan) -> list[int]:
    """How many held-out rows and training rows the limits of `plan` allow in an evaluation."""
    together = plan.evaluation_batch * plan.device.count
    return [plan.evaluation_batches(get(plan, key)) * together for key in EVALUATED[:2]]


@pytest.mark.parametrize("batches", [3, 4])
def test_a_resumed_run_has_the_rows_of_an_evaluation_that_are_asked_for(batches: int) -> None:
    before = replace(Plan(), {**TWO, "train.evaluation_batches": 4})
    after = changed(before, {"device.count": 1, "train.evaluation_batches": batches})
    assert [get(after, key) for key in EVALUATED] == [batches, 4, None]


def test_devices_that_cannot_share_the_rows_are_refused() -> None:
    with pytest.raises(PlanError, match="12 rows, which 5 devices cannot share equally") as error:
        changed(replace(Plan(), TWO), {"device.count": 5})
    assert error.value.key == "device.count"
