"""What a run writes, says and answers while its disk is full."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from memconsole.cli.main import main
from memconsole.plan.plan import Plan
from memconsole.runs.act import control, launch
from memconsole.runs.act.supervise import serving as serving_module
from memconsole.runs.act.supervise.serving import Serving
from memconsole.runs.act.supervise.stop_deadline import (
    LONGEST_SECONDS,
    SHORTEST_SECONDS,
    StopDeadline,
)
from memconsole.runs.read.life.liveness import Liveness
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.unsaved import unsaved_words
from memconsole.runs.read.shown.words import state_word
from memconsole.runs.record import files, requests, spares
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.failures.failure import cause_of, words_of
from memconsole.runs.record.processes.heartbeat import HEARTBEAT_BYTES, Heartbeat
from memconsole.runs.record.redaction import OutputStream
from memconsole.runs.record.run_store import create_run, list_runs
from memconsole.tui.run.header import header_lines
from memconsole.tui.views.run_view import RunView


class Note(msgspec.Struct):
    words: str


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = create_run(Plan())
    made.new_attempt()
    return made


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be made, and none can grow."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_atomic", refused)


@pytest.mark.parametrize("module", [files, launch])
def test_a_launch_on_a_full_disk_fails_and_leaves_no_run(
    module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "write_atomic", refused)
    monkeypatch.setattr(sys, "argv", ["memconsole", "train", "--set", "device.name=cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert list_runs() == []


class Disk(io.StringIO):
    """An output that is full for a while."""

    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_printing_on_a_full_disk_is_counted_and_told_once_there_is_room() -> None:
    disk = Disk()
    output = OutputStream(disk, ["secret!"])
    print("one", file=output, flush=True)
    disk.full = True
    print("four secret!", file=output, flush=True)
    disk.full = False
    print("secret!", file=output, flush=True)
    assert disk.getvalue() == "one\n[13 characters could not be written]\n[redacted]\n"


def test_each_spare_file_holds_one_record_of_a_full_disk(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "spares"
    spares.keep(folder)
    assert len(list(folder.iterdir())) == spares.SPARES
    blocks = {path.name: path.stat().st_ino for path in folder.iterdir()}
    request.getfixturevalue("full")
    written = [tmp_path / f"{number}.json" for number in range(spares.SPARES)]
    for path in written:
        spares.write_struct(folder, path, Note(path.name))
    assert {path.stat().st_ino for path in written} == set(blocks.values())
    for path in written:
        assert files.read_struct(path, Note) == Note(path.name)
    with pytest.raises(OSError, match="No space"):
        spares.write_struct(folder, tmp_path / "more.json", Note("more"))
    with pytest.raises(OSError, match="No space"):
        spares.write_struct(folder, written[0], Note("x" * spares.SPARE_BYTES))
    assert sorted(tmp_path.iterdir()) == sorted([folder, *written])


def test_a_file_takes_the_space_of_a_spare_one_and_is_written_in_place(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    spares.keep(tmp_path / "spares")
    request.getfixturevalue("full")
    path = tmp_path / "heartbeat"
    spares.reserve(tmp_path / "spares", path, HEARTBEAT_BYTES)
    assert path.read_bytes() == bytes(HEARTBEAT_BYTES)
    assert len(list((tmp_path / "spares").iterdir())) == spares.SPARES - 1
    with pytest.raises(OSError, match="No space"):
        spares.reserve(tmp_path / "spares", path, spares.SPARE_BYTES + 1)


def test_an_error_of_a_full_disk_names_the_file_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refused)
    path = tmp_path / "tokens.json"
    with pytest.raises(OSError, match="No space") as raised:
        files.write_atomic(path, b"{}")
    monkeypatch.undo()
    words = f"{path} cannot be written: No space left on device; free some room there"
    assert words_of(raised.value) == words
    assert words_of(OSError(errno.EIO, "Input/output error", str(path))) != words
    assert cause_of(raised.value) == "disk"
    assert list(tmp_path.iterdir()) == []


def test_a_request_whose_reply_finds_no_room_is_served_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("full")
    for number in range(2):  # of the requests; their replies find none
        run.spares_path.mkdir(exist_ok=True)
        (run.spares_path / str(number)).write_bytes(bytes(spares.SPARE_BYTES))
    live = Liveness("running", 1, supervisor_pid=os.getpid())
    monkeypatch.setattr("memconsole.runs.act.control.liveness", lambda run: live)
    asked = [control.request(run, "stop", "me"), control.request(run, "stop", "me")]
    said: list[str] = []
    acted: list[str] = []
    serving = Serving(run, said.append)
    serving.attempt = 1
    for _ in range(3):
        serving.serve(lambda request: acted.append(request.id))
    assert acted == asked
    assert [who for who, _ in serving.stops] == ["me", "me"]
    assert all(requests.reply_to(run, one) is None for one in asked)
    assert "No space" in said[0]
    monkeypatch.undo()
    serving.serve(lambda request: acted.append("again"))
    assert acted == asked
    assert requests.pending(run) == []


def test_a_pause_takes_effect_before_it_is_answered(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Liveness("running", 1, supervisor_pid=os.getpid())
    monkeypatch.setattr(control, "liveness", lambda _: live)
    serving = Serving(run, lambda text: None)
    serving.attempt = 1

    def act(request: requests.Request) -> None:
        assert requests.reply_to(run, request.id) is None

    asked = control.request(run, "pause", "me")
    serving.serve(act)
    assert control.wait_accepted(run, asked).note == ""


def test_a_pause_that_fails_is_refused_with_the_reason(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Liveness("running", 1, supervisor_pid=os.getpid())
    monkeypatch.setattr(control, "liveness", lambda _: live)
    said: list[str] = []
    serving = Serving(run, said.append)
    serving.attempt = 1

    def act(request: requests.Request) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    asked = control.request(run, "pause", "me")
    serving.serve(act)
    with pytest.raises(RunError, match="No space left on device"):
        control.wait_accepted(run, asked)
    assert "pause: [Errno 28] No space left on device" in said[0]


def beat(phase: str, step: int) -> Heartbeat:
    return Heartbeat(1, 1, step, 0, phase)


def test_a_stop_waits_for_a_trainer_that_cannot_save() -> None:
    deadline = StopDeadline(0.0, SHORTEST_SECONDS)
    deadline.hold(10 * LONGEST_SECONDS)
    assert deadline.at == 10 * LONGEST_SECONDS + SHORTEST_SECONDS
    deadline.moved(10 * LONGEST_SECONDS + 30)
    assert deadline.at == 10 * LONGEST_SECONDS + SHORTEST_SECONDS


def test_a_stop_is_no_kill_after_the_machine_has_slept(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(serving_module, "boot_seconds", lambda: now)
    serving = Serving(run, lambda text: None)
    assert not serving.overdue(beat("train", 1))
    serving._count_stop("me")
    now += SHORTEST_SECONDS - 1
    for _ in range(2):
        now += LONGEST_SECONDS
        assert not serving.overdue(beat("train", 1)), "it slept"
    for _ in range(int(SHORTEST_SECONDS / 5) + 1):
        now += 5.0
        late = serving.overdue(beat("train", 1))
    assert late


def test_what_is_in_memory_only_is_said_by_its_steps(run: RunDirectory) -> None:
    assert unsaved_words(run, beat("train", 7)) == ""
    assert unsaved_words(run, beat("wait_disk", 1)).startswith("cannot save step 1: the disk of ")
    before = f"cannot record what happens: the disk of {run.path} is full or fails"
    assert unsaved_words(run, beat("wait_disk", 0)) == before
    (run.checkpoints_path / "step-000000004").mkdir()
    words = unsaved_words(run, beat("wait_disk", 1_200))
    assert words.startswith("cannot save steps 5 to 1,200: the disk of ")
    shown = RunSnapshot(
        id="a", name="a", state="running", plan=Plan(), attempt=1, created_wall=0.0, unsaved=words
    )
    lines = ["".join(span.text for span in line) for line in header_lines(RunView(shown), 80)]
    assert state_word(shown) == "cannot save"
    assert "▲ cannot save" in lines[0]
    assert "▲ cannot save steps 5 to 1,200: the disk of " in lines[1]
