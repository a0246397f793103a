"""A run that a Slurm job trains: its script, and its state from its own files first, then from Slurm."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life import slurm
from memconsole.runs.read.life.liveness import Liveness, liveness
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes.heartbeat import HeartbeatWriter
from memconsole.runs.record.records import (
    AttemptRecord,
    ExitRecord,
    FinalRecord,
    Identity,
    JobPlace,
    JobRecord,
)
from memconsole.runs.record.run_store import create_run
from memconsole.runs.record.states import Verdict

ON_SLURM = replace(Plan(), {"launch.on": "slurm", "device.name": "cpu"})
NODE = Identity(pid=4_000_000, start_ticks=1, boot_id="another", host="n1")
STOPPED = Verdict(reason="stopped", evidence="stopped at step 3", resumable=True)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def job(text: str, number: str = "7") -> slurm.SlurmJob:
    """A job from its state, and perhaps `key=value` words."""
    state, *rest = text.split()
    given = dict(word.split("=") for word in rest)
    restarts = int(given.pop("restarts", "0"))
    return slurm.SlurmJob(number, state, restarts=restarts, nodes="n1", **given)


def of_job(begun: bool, says: str, **exit_record: object) -> RunDirectory:
    """A run whose job is 7, with an attempt on another machine, whose exit record `says` how it ended."""
    run = create_run(ON_SLURM, "a test")
    record = JobRecord(id="7", attempts_before=0, submitted_wall=time.time() - 3600)
    if begun:
        path = run.attempt_path(run.new_attempt())
        HeartbeatWriter(path).beat("train", 3, 0, 1.0)
        files.write_struct(
            path / "attempt.json",
            AttemptRecord(
                attempt=1,
                supervisor=NODE,
                trainer=NODE,
                started_wall=1.0,
                job=JobPlace(id="7", nodes="n1"),
            ),
        )
        if says == "final":
            last = FinalRecord(exit_code=0, step=3, reason="finished")
            files.write_struct(path / "final.json", last)
        elif says:
            verdict = msgspec.structs.replace(STOPPED, reason=says)
            requeues = bool(exit_record.get("requeues"))
            end = ExitRecord(verdict=verdict, time_wall=1.0, requeues=requeues)
            files.write_struct(path / "exit.json", end)
    cancelled = str(exit_record.get("cancelled_by", ""))
    files.write_struct(run.job_path, msgspec.structs.replace(record, cancelled_by=cancelled))
    return run


def seen(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, says: str) -> Liveness:
    """The run's state where Slurm `says` this of job 7; "?" if it does not answer, "" if it knows none."""
    answer = slurm.JobList({"7": job(says)} if says else {})
    if says == "?":
        answer = slurm.JobList({}, "Unable to contact slurm controller")
    monkeypatch.setattr(slurm, "QUEUE", slurm.Queue(lambda: answer))
    return liveness(run)


@pytest.mark.parametrize(
    ("begun", "recorded", "slurm_says", "state", "words"),
    [
        (False, "", "PENDING reason=Resources", "queued", "waits in the queue (Resources)"),
        (False, "", "CONFIGURING", "starting", "begins on n1"),
        (False, "", "?", "queued", "Unable to contact slurm controller"),
        (False, "", "FAILED reason=NonZeroExitCode", "failed", "ended as FAILED (NonZeroExitCode)"),
        (False, "", "FAILED", "failed", "it wrote nothing to"),
        (False, "", "CANCELLED", "stopped", "was cancelled before it began"),
        (False, "", "", "lost", "no longer known to Slurm"),
        (True, "", "RUNNING", "running", "Slurm job 7 on n1"),
        (True, "", "?", "running", "Unable to contact slurm controller"),
        (True, "", "PENDING reason=BeginTime", "queued", "(BeginTime)"),
        (True, "", "RUNNING restarts=1", "starting", "begins on n1"),
        (True, "", "NODE_FAIL", "failed", "lost its node; last seen at step 3, phase train"),
        (True, "", "OUT_OF_MEMORY", "failed", "used more memory than it had asked for"),
        (True, "", "TIMEOUT", "failed", "reached its time limit"),
        (True, "", "", "lost", "no longer known to Slurm"),
        (True, "final", "COMPLETED", "finished", "exit code 0 at step 3"),
        (True, "stopped", "COMPLETED", "stopped", "stopped at step 3"),
        (True, "stopped", "PENDING reason=BeginTime", "queued", "(BeginTime)"),
        (True, "stopped", "COMPLETING", "stopped", "stopped at step 3"),
        (True, "stopped", "?", "stopped", "stopped at step 3"),
    ],
)
def test_the_state_of_a_job_is_what_files_and_then_slurm_say(
    monkeypatch: pytest.MonkeyPatch,
    begun: bool,
    recorded: str,
    slurm_says: str,
    state: str,
    words: str,
) -> None:
    now = seen(of_job(begun, recorded), monkeypatch, slurm_says)
    assert now.state == state
    assert words in (now.verdict.evidence if now.verdict else now.job)
    assert now.live == (now.verdict is None)


@pytest.mark.parametrize(
    ("slurm_says", "state"),
    [("COMPLETING", "queued"), ("?", "queued"), ("PENDING", "queued"), ("COMPLETED", "stopped")],
)
def test_a_job_that_puts_itself_back_into_the_queue_is_live(
    monkeypatch: pytest.MonkeyPatch, slurm_says: str, state: str
) -> None:
    assert seen(of_job(True, "stopped", requeues=True), monkeypatch, slurm_says).state == state


def test_slurm_is_not_asked_about_a_finished_or_a_cancelled_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm, "QUEUE", slurm.Queue(lambda: pytest.fail("asked")))
    assert liveness(of_job(True, "finished")).state == "finished"
    now = liveness(of_job(False, "", cancelled_by="ann"))
    assert now.state == "stopped"
    assert now.verdict is not None
    assert now.verdict.evidence == "Slurm job 7 was cancelled by ann before it began"


def test_what_a_job_said_before_it_died_is_why_it_did_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = of_job(False, "")
    run.job_log.write_text("first\n/var/spool/job.sh: line 9: exec: python: not found\n")
    now = seen(run, monkeypatch, "FAILED reason=NonZeroExitCode")
    assert now.verdict is not None
    assert now.verdict.evidence == (
        "Slurm job 7 ended as FAILED (NonZeroExitCode) before it began to train: "
        "/var/spool/job.sh: line 9: exec: python: not found"
    )


def test_a_job_that_was_just_submitted_waits_although_an_older_answer_does_not_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = of_job(False, "")
    files.write_struct(
        run.job_path, JobRecord(id="7", attempts_before=0, submitted_wall=time.time())
    )
    assert seen(run, monkeypatch, "").state == "queued"


def test_a_snapshot_of_a_run_elsewhere_tells_its_job_and_uses_no_clock_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = of_job(True, "")
    assert seen(run, monkeypatch, "RUNNING").elsewhere
    shown = Follower(run).poll()
    assert (shown.state, shown.job) == ("running", "Slurm job 7 on n1")
    assert shown.elapsed_seconds == 0.0
    assert Follower(run).status().job == "Slurm job 7 on n1"


def test_one_answer_of_slurm_serves_every_run_for_some_seconds() -> None:
    given: list[slurm.JobList] = []
    clock = [0.0]

    def ask() -> slurm.JobList:
        given.append(slurm.JobList({}, "no" if len(given) == 1 else ""))
        return given[-1]

    queue = slurm.Queue(ask, lambda: clock[0])
    for moment, times in ((0, 1), (4.9, 1), (5, 2), (34.9, 2), (35, 3)):
        clock[0] = moment
        queue.jobs()
        assert len(given) == times
    queue.forget()
    queue.jobs()
    assert len(given) == 4


def test_what_squeue_prints_is_read_by_its_fields_and_damaged_lines_are_left_out() -> None:
    found = slurm.parse(
        "12|PENDING|Resources|0||2026-11-23 20:35|\n13|RUNNING|None|2|n[1-2]|2026-11-23 20:30|\n"
        "garbage\n\n|PENDING|x|0|||\n14|PENDING|\x1b[31mevil|x||N/A|\n"
    )
    assert set(found) == {"12", "13", "14"}
    assert found["13"] == slurm.SlurmJob("13", "RUNNING", "", 2, "n[1-2]", "2026-11-23 20:30")
    assert "\x1b" not in found["14"].reason
    assert slurm.waiting_words(found["12"]) == (
        "waits in the queue (Resources), expected to begin at 2026-11-23 20:35"
    )


def test_a_slurm_that_is_not_there_fails_or_hangs_is_an_answer_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert slurm.ask_squeue(("no-such-squeue",)).trouble == "there is no no-such-squeue here"
    failing = ("sh", "-c", "echo squeue: error: Unable to contact >&2; exit 1")
    assert slurm.ask_squeue(failing).trouble == "squeue: error: Unable to contact"
    monkeypatch.setattr(slurm, "TIMEOUT_SECONDS", 0.1)
    assert "does not answer" in slurm.ask_squeue(("sleep", "5")).trouble
