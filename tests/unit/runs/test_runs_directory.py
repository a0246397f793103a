"""Run directories: private, found by what people type, never by what they title."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.plan import plan as plans
from memconsole.plan import plan_file
from memconsole.plan.plan import Plan, PlanError
from memconsole.runs.act import delete
from memconsole.runs.act.delete import delete_run
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.read.life.newest import find_live, find_paused
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.processes import locks
from memconsole.runs.record.records import PAUSED, ExitRecord, RunRecord
from memconsole.runs.record.run_store import RUN_ID, create_run, find_run, list_runs, make_runs_root
from memconsole.runs.record.states import Verdict


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/memconsole/runs"


def test_a_new_run_holds_its_plan_and_only_its_owner_can_read_it() -> None:
    previous = os.umask(0)
    try:
        plan = plans.replace(Plan(), {"train.batch_size": 3})
        run = create_run(plan, "mine", {"CUDA_VISIBLE_DEVICES": "0"})
    finally:
        os.umask(previous)
    assert RUN_ID.fullmatch(run.id)
    assert run.read_plan() == plan
    record = run.record()
    assert record is not None
    assert record.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    for path in [run.path, *run.path.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_run_needs_a_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run keeps the folder that its relative paths begin at."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(PlanError, match="the current folder is gone"):
        create_run(Plan())


def test_a_title_is_data_and_never_a_path(root: Path) -> None:
    for title in (
        "../../x",
        "/etc/passwd",
        "a\nb\x1b]0;t\x07",
        "-rf",
        "%2e%2e",
        "x" * 5000,
        "$(id)",
    ):
        run = create_run(Plan(), title)
        assert run.path.parent == root
        assert len(run.name) <= 80
        assert "\x1b" not in run.name
        assert "\n" not in run.name
        assert find_run(run.name[:80]) == run or run.name == run.id


def test_runs_are_found_by_id_start_end_name_and_latest() -> None:
    first = create_run(Plan(), "alpha")
    second = create_run(Plan(), "beta")
    os.rename(second.path, second.path.with_name("29990101-000000-aaaaaa"))
    second = RunDirectory(second.path.with_name("29990101-000000-aaaaaa"))
    assert [run.id for run in list_runs()] == [second.id, first.id]
    assert find_run("latest") == second
    assert find_run("2999") == second
    assert find_run("aaaaaa") == second
    assert find_run("alpha") == first
    assert find_run(first.id) == first
    with pytest.raises(RunError, match="start of 2 runs"):
        find_run("2")
    named = create_run(Plan(), "2999")
    assert find_run("2999") == named, "a name comes before the beginning of another run's id"
    assert find_run("29990") == second
    delete_run(named)
    with pytest.raises(RunError, match='no run "alpah" — did you mean "alpha"'):
        find_run("alpah")
    for hostile in ("../..", "", "a/b", "\x1b[2J", "."):
        with pytest.raises(RunError):
            find_run(hostile)


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="needs time zones")
def test_the_latest_run_is_the_newest_although_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """25 October 2026 has the hour from 2 to 3 twice in Berlin."""
    twice = 1792886400.0
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        monkeypatch.setattr(time, "time", lambda: twice + 1800)
        older = create_run(Plan(), "same name")
        monkeypatch.setattr(time, "time", lambda: twice + 3660)
        newer = create_run(Plan(), "same name")
        assert newer.id[:15] < older.id[:15]
        assert list_runs() == [newer, older]
        assert find_run("latest") == find_run("same name") == newer
        older.record_path.unlink()
        assert older.created_wall == pytest.approx(twice + 1800, abs=3600), "as its id says"
        listed = json.loads(CliRunner().invoke(cli, ["runs", "--json"]).output)
        assert [run["id"] for run in listed] == [run.id for run in list_runs()]
    finally:
        monkeypatch.undo()
        time.tzset()


def dated(name: str, seconds_ahead: float) -> RunDirectory:
    run = create_run(Plan(), name)
    record = run.record()
    assert record is not None
    there = msgspec.structs.replace(record, created_wall=time.time() + seconds_ahead)
    files.write_struct(run.record_path, there)
    return run


def test_a_run_dated_in_the_future_is_not_the_latest_until_that_day() -> None:
    old, future = dated("old", -3600), dated("future", 86400)
    new, ahead = dated("new", -60), dated("of a machine whose clock is ahead", 20)
    assert list_runs() == [ahead, new, old, future]
    assert find_run("latest") == ahead
    listed = json.loads(CliRunner().invoke(cli, ["runs", "--json"]).output)
    assert [run["id"] for run in listed] == [run.id for run in list_runs()]


def test_stop_and_pause_are_about_the_newest_live_run_resume_about_the_paused_one_and_logs_about_the_newest() -> (
    None
):
    live, newest = create_run(Plan(), "live"), create_run(Plan(), "newest")
    ended(newest, "finished")
    assert find_live(None) == newest, "so that a command can say what it is"
    lock = locks.take(live.supervisor_lock)
    try:
        assert find_live(None) == live
        assert find_live("latest") == find_run("latest") == newest
        assert find_paused(None) == newest, "which can be resumed"
        for command in ("stop", "pause", "profile"):
            answer = CliRunner().invoke(cli, [command], input="n\n")
            assert live.id in f"{answer.output}{answer.exception}"
        (live.attempt_path(live.new_attempt()) / PAUSED).touch()
        assert find_paused(None) == live
        assert find_paused("latest") == newest
    finally:
        lock.release()


def test_no_runs_is_said_plainly() -> None:
    with pytest.raises(RunError, match="no runs yet"):
        find_run("latest")
    with pytest.raises(RunError, match="no runs yet"):
        find_live(None)


def test_a_place_others_can_write_to_is_refused(root: Path, tmp_path: Path) -> None:
    make_runs_root()
    root.chmod(0o770)
    with pytest.raises(RunError, match="others can write"):
        create_run(Plan())
    root.chmod(0o700)
    root.parent.chmod(0o777)
    with pytest.raises(RunError, match="others can replace"):
        list_runs()
    root.parent.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(root, 12345, 12345)
        with pytest.raises(RunError, match="belongs to user 12345"):
            create_run(Plan())
        os.chown(root, 0, 0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    elsewhere.chmod(0o777)
    root.rmdir()
    root.symlink_to(elsewhere)
    with pytest.raises(RunError, match="others can write"):
        create_run(Plan())


def test_links_and_strange_names_are_not_runs(root: Path, tmp_path: Path) -> None:
    run = create_run(Plan())
    (root / "29990101-000000-zzzzzz").symlink_to(tmp_path)
    (root / "29990101-000000-yyyyyy").write_text("a file")
    (root / "notes").mkdir()
    assert list_runs() == [run]


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    run = create_run(Plan())
    target = tmp_path / "target"
    target.write_text('{"version": 1}')
    run.record_path.unlink()
    run.record_path.symlink_to(target)
    assert run.record() is None
    assert run.name == run.id
    (run.path / "trainer.lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        locks.take(run.trainer_lock)
    assert target.read_text() == '{"version": 1}'


def test_damaged_records_read_as_nothing() -> None:
    run = create_run(Plan())
    for content in (b"", b"{", b"\xff" * 10, b"[1]", b"[" * 10_000, b"x" * (2 << 20)):
        run.record_path.write_bytes(content)
        assert run.record() is None


def test_an_atomic_write_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_attempts_count_up_and_the_newest_owns_the_run() -> None:
    run = create_run(Plan())
    assert run.newest_attempt() is None
    assert [run.new_attempt() for _ in range(3)] == [1, 2, 3]
    (run.attempts_path / "junk").mkdir()
    (run.attempts_path / "12345").mkdir()
    assert run.newest_attempt() == 12345
    assert run.attempt_path(7).name == "0007"


def test_checkpoints_count_only_when_committed() -> None:
    run = create_run(Plan())
    for name in (
        "step-1000000000",
        "step-000000020",
        "step-5",
        ".tmp-300",
        ".trash-step-000000001",
    ):
        (run.checkpoints_path / name).mkdir()
    found = [path.name for path in run.committed_checkpoints()]
    assert found == ["step-000000020", "step-1000000000"]


def ended(run: RunDirectory, reason: str) -> None:
    number = run.new_attempt()
    record = ExitRecord(verdict=Verdict(reason=reason, evidence="test"), time_wall=1.0)
    files.write_struct(run.attempt_path(number) / "exit.json", record)


def test_a_living_run_is_not_deleted_and_a_dead_one_is() -> None:
    run = create_run(Plan())
    ended(run, "finished")
    code = (
        "import sys, time; from pathlib import Path; from memconsole.runs.record.processes import locks;"
        f"lock = locks.take_gang(Path({str(run.gang_lock)!r})); print('held', flush=True);"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunError, match="orphaned"):
            delete_run(run)
        other.kill()
    delete_run(run)
    assert not run.path.exists()
    assert list_runs() == []


def test_a_run_that_another_person_deleted_meanwhile_is_said_to_be_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = create_run(Plan())
    delete_run(run)
    with pytest.raises(RunError, match=f"run {run.id} has been deleted already"):
        delete_run(run)
    later = create_run(Plan())
    monkeypatch.setattr(delete, "end_trackers", lambda run: shutil.rmtree(run.path))
    with pytest.raises(RunError, match="has been deleted already"):
        delete_run(later)


def test_a_run_that_cannot_be_written_cannot_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(Plan())

    def denied(path: Path) -> tuple[int, tuple[int, int]]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(locks, "_open", denied)
    with pytest.raises(RunError, match="cannot be deleted: Permission denied"):
        delete_run(run)
    assert run.path.exists()


def test_files_that_a_deletion_leaves_are_named_and_removed_by_the_next_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = create_run(Plan()), create_run(Plan())
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        left = root / f".trash-{run.id}"
        with pytest.raises(RunError, match=f"deleted, but these files remain: {left}"):
            delete_run(run)
    assert [each.id for each in list_runs()] == [other.id]
    delete_run(other)
    assert list(root.iterdir()) == []


def test_a_thousand_runs_are_judged_without_delay() -> None:
    run = create_run(Plan())
    ended(run, "finished")
    begun = time.process_time()
    for _ in range(1000):
        assert liveness(run).state == "finished"
    # About 0.1 s here; the bound only catches another order of magnitude.
    assert time.process_time() - begun < 3.0


def test_run_ids_sort_by_time_and_do_not_repeat() -> None:
    ids = [create_run(Plan()).id for _ in range(20)]
    assert len(set(ids)) == 20
    assert all(re.fullmatch(r"\d{8}-\d{6}-[a-z2-7]{6}", word) for word in ids)


def test_a_record_of_a_later_version_is_still_read() -> None:
    run = create_run(Plan(), "later")
    text = run.record_path.read_text().replace("{", '{"added_later": [1, {"x": 2}],', 1)
    run.record_path.write_text(text)
    record = run.record()
    assert isinstance(record, RunRecord)
    assert record.name == "later"


def test_a_folder_and_variables_that_are_not_utf8_are_recorded_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = os.fsencode(tmp_path) + b"/m\xf6"
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    run = create_run(Plan(), environment={"OMP_PLACES": os.fsdecode(b"\xf6")})
    record = run.record()
    assert record is not None
    assert record.directory == f"{tmp_path}/m\\udcf6"
    assert record.environment == {"OMP_PLACES": "\\udcf6"}


def test_a_run_that_cannot_be_described_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: object) -> str:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed")

    monkeypatch.setattr(plan_file, "dumps_run", failing)
    with pytest.raises(UnicodeEncodeError):
        create_run(Plan())
    assert os.listdir(root) == []


def test_a_folder_of_runs_that_is_not_utf8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", os.fsdecode(os.fsencode(tmp_path) + b"/s\xf6"))
    with pytest.raises(RunError) as refused:
        create_run(Plan())
    why = "the name of this folder is not UTF-8; set XDG_STATE_HOME to another"
    assert str(refused.value) == f"{tmp_path}/s\\udcf6/memconsole: {why}"
