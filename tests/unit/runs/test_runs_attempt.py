"""What a trainer's side of an attempt promises."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

import pytest

from memconsole.plan.plan import Plan
from memconsole.runs.act.trainer.attempt import Attempt, Fenced
from memconsole.runs.read.state.reduce import RunState, reduce
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventreader import EventReader
from memconsole.runs.record.processes import locks
from memconsole.runs.record.processes.heartbeat import read_heartbeat
from memconsole.runs.record.records import ErrorRecord, FinalRecord
from memconsole.runs.record.run_store import create_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = create_run(Plan())
    made.new_attempt()
    return made


def test_an_attempt_holds_its_locks_while_it_lasts(run: RunDirectory) -> None:
    with Attempt(run, 1) as attempt:
        assert locks.holder(run.trainer_lock) == os.getpid()
        assert locks.gang_held(run.gang_lock)
        assert run.reserve_path.stat().st_size > 0
        assert attempt.is_newest()
        run.new_attempt()
        assert not attempt.is_newest()
    assert locks.held(run.path) == locks.Holders(None, None, False)
    assert not run.reserve_path.exists()


def test_an_older_or_second_attempt_leaves_with_76(run: RunDirectory) -> None:
    run.new_attempt()
    with pytest.raises(Fenced) as fenced, Attempt(run, 1):
        pass
    assert fenced.value.code == 76
    with Attempt(run, 2), pytest.raises(Fenced), Attempt(run, 2):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_ask_to_stop_however_often(run: RunDirectory, number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Attempt(run, 1) as attempt:
        assert not attempt.stop_requested
        os.kill(os.getpid(), number)
        assert attempt.stop_requested
        signal.raise_signal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)
        assert attempt.stop_requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_exception_is_recorded_once_without_secrets_or_escapes(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret-value")
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "stderr", printed)
    problem = ValueError("very-secret-value \x1b[31m hf_aaaaaaaaaaaaaaaaaaaaaaaa \ud800")

    def train() -> None:
        with Attempt(run, 1) as attempt:
            attempt.progress("train", 5)
            print("printed very-secret-value", file=sys.stderr)
            attempt.emit(events.Warning(message="saw very-secret-value"))
            assert attempt.report(problem) == "crashed"
            raise problem

    with pytest.raises(ValueError, match="very"):
        train()
    record = files.read_struct(run.attempt_path(1) / "error.json", ErrorRecord)
    assert record is not None
    assert (record.type, record.cause, record.step) == ("ValueError", "crashed", 5)
    assert "ValueError: [redacted]" in record.traceback
    errors = [e for e in EventReader(run.attempt_path(1)).read() if isinstance(e, events.Error)]
    assert len(errors) == 1
    assert printed.getvalue() == "printed [redacted]\n"
    for path in run.path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"very-secret-value" not in content, path
            assert b"hf_aaaa" not in content, path
            # A heartbeat holds numbers in binary, of whose bytes any may be that of an escape.
            assert path.name == "heartbeat" or b"\x1b" not in content, path


def test_a_run_out_of_memory_tells_the_peaks_that_its_last_reading_missed(
    run: RunDirectory,
) -> None:
    memory = events.Memory(
        phase="train", step=1, allocated_bytes=40, peak_bytes=50, reserved_bytes=None, device_bytes=None,
        device_total_bytes=None, host_bytes=200, peak_host_bytes=272,
    )  # fmt: skip
    with Attempt(run, 1) as attempt:
        attempt.read_memory = lambda: (90, 599, 710)
        attempt.emit(events.Phase(phase="train"))
        attempt.emit(memory)
        assert attempt.report(MemoryError("no room")) == "out_of_memory"
    state = RunState()
    for record in EventReader(run.attempt_path(1)).read():
        state = reduce(state, record)
    assert (state.peak_bytes, state.peak_host_bytes) == (599, 710)


def test_last_words_and_signs_of_life_are_on_disk(run: RunDirectory) -> None:
    with Attempt(run, 1) as attempt:
        attempt.progress("checkpoint", 7, 1234)
        beat = read_heartbeat(run.attempt_path(1))
        assert beat is not None
        assert (beat.phase, beat.step, beat.bytes_written) == ("checkpoint", 7, 1234)
        attempt.finish(75, 7, "stopped", "step-7")
    final = files.read_struct(run.attempt_path(1) / "final.json", FinalRecord)
    assert final is not None
    assert (final.exit_code, final.step, final.checkpoint) == (75, 7, "step-7")


def test_leaving_by_exit_is_not_an_error(run: RunDirectory) -> None:
    with pytest.raises(SystemExit), Attempt(run, 1):
        sys.exit(75)
    assert not (run.attempt_path(1) / "error.json").exists()


def test_a_forked_worker_speaks_for_nobody(run: RunDirectory) -> None:
    with Attempt(run, 1) as attempt:
        attempt.emit(events.Warning(message="the trainer"))
        child = os.fork()
        if child == 0:
            attempt.emit(events.Warning(message="a worker"))
            attempt.progress("train", 99)
            attempt.free_reserve()
            os._exit(0)
        os.waitpid(child, 0)
        assert run.reserve_path.exists()
    (record,) = EventReader(run.attempt_path(1)).read()
    assert isinstance(record, events.Warning)
    assert record.message == "the trainer"
    beat = read_heartbeat(run.attempt_path(1))
    assert beat is not None
    assert beat.step == 0


def test_a_lost_run_directory_does_not_stop_the_trainer(run: RunDirectory) -> None:
    import shutil

    with Attempt(run, 1) as attempt:
        shutil.rmtree(run.path)
        attempt.emit(events.Warning(message="still here"), durable=True)
        attempt.progress("train", 1)
        assert not attempt.is_newest()
        attempt.finish(75, 1, "stopped")
