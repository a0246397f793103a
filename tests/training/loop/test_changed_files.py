"""Runs whose data or tokenizer changed on disk: refused, continued by consent, or healed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memconsole.plan.plan import PlanError
from memconsole.runs.act import launch
from memconsole.runs.record import consent
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures.failure import ExitCode
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchStream, Item
from memconsole_trainer.weights.trained import read
from tests.training.harness.runs import attempt, final, plan, state_hashes, told

pytest.importorskip("torch")


class Runs(NamedTuple):
    data: Path
    whole: RunDirectory
    stopped: RunDirectory
    """The same run, stopped at its fourth step."""


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        made = Runs(text, create_run(plan(text)), create_run(plan(text)))
    assert attempt(made.whole) == 0
    assert attempt(made.stopped, lambda phase, step: step >= 4) == ExitCode.STOPPED
    return made


@pytest.fixture
def stopped(runs: Runs, tmp_path: Path) -> RunDirectory:
    """A copy of the stopped run."""
    return RunDirectory(shutil.copytree(runs.stopped.path, tmp_path / runs.stopped.id))


@pytest.fixture
def changed(runs: Runs) -> Iterator[Path]:
    """One word near the end of a file is another while the test runs; its size is the same."""
    path = runs.data / "07.txt"
    before, status = path.read_text(), path.stat()
    path.write_text(before[:-3] + "xyz")
    yield path
    path.write_text(before)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def fewer(runs: Runs, tmp_path: Path) -> Iterator[None]:
    """All files but three are away while the test runs."""
    away = sorted(runs.data.glob("*.txt"))[3:]
    for path in away:
        path.rename(tmp_path / path.name)
    yield
    for path in away:
        (tmp_path / path.name).rename(path)


def errors(run: RunDirectory) -> list[str]:
    return [error.message for error in told(run, events.Error)]


def test_changed_data_is_refused_until_the_user_agrees(
    runs: Runs, stopped: RunDirectory, changed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attempt(stopped) == ExitCode.BAD_DATA
    assert "data has changed since step-000000004" in errors(stopped)[-1]
    assert f"memconsole resume {stopped.id} --changed-data" in errors(stopped)[-1]
    monkeypatch.setattr(launch, "start_supervisor", lambda run, mode: run.new_attempt())
    launch.resume(stopped, changed_data=True)
    assert attempt(stopped, lambda phase, step: step >= 6) == ExitCode.STOPPED
    assert any("continuing with it" in w.message for w in told(stopped, events.Warning))
    assert consent.agreed(stopped) is None  # it ended with the checkpoint of step 6
    assert attempt(stopped) == 0
    assert state_hashes(stopped) != state_hashes(runs.whole)


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_documents_than_it_had_read(
    stopped: RunDirectory, fewer: None
) -> None:
    consent.agree(stopped, "a test")
    assert attempt(stopped) == 0
    assert any("other names, lengths" in w.message for w in told(stopped, events.Warning))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("07.txt: cannot be read: No such file or directory"), ExitCode.BAD_DATA),
        (PlanError("data.isolate_documents = true: a record holds its end"), ExitCode.BAD_PLAN),
    ],
    ids=["unreadable", "unusable"],
)
def test_a_run_whose_data_fail_in_its_middle_keeps_every_step_and_goes_on_when_they_can_be_used(
    error: Exception,
    code: ExitCode,
    runs: Runs,
    stopped: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_before, reads = BatchStream.next, iter(range(2))

    def gone(stream: BatchStream, *waiting: Any) -> Item:
        if next(reads, None) is None:
            raise error
        return read_before(stream, *waiting)

    with monkeypatch.context() as patch:
        patch.setattr(BatchStream, "next", gone)
        assert attempt(stopped) == code
    assert errors(stopped)[-1] == str(error)
    assert final(stopped)["step"] == 6
    assert stopped.committed_checkpoints()[-1].name == "step-000000006"
    assert attempt(stopped) == 0
    assert state_hashes(stopped) == state_hashes(runs.whole)


@pytest.mark.parametrize("held", [False, True], ids=["tokenized again", "tokens held"])
def test_data_that_changes_while_it_is_trained_on_is_told_once_if_it_is_read_again(
    held: bool, stopped: RunDirectory, changed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not held:
        monkeypatch.setattr("memconsole_trainer.data.text.portion.open_cache", lambda *_: None)
    text = changed.read_text()
    consent.agree(stopped, "a test")

    def write(phase: str, step: int) -> bool:
        if step == 8:
            changed.write_text(text[:-3] + "abc")
        return False

    assert attempt(stopped, write) == 0
    warnings = [w.message for w in told(stopped, events.Warning)]
    assert sum("changed on disk" in message for message in warnings) == (not held)


def test_a_checkpoint_without_hashes_is_resumed_by_its_fingerprint(
    runs: Runs, stopped: RunDirectory
) -> None:
    import hashlib

    (newest,) = stopped.committed_checkpoints()[-1:]
    state = json.loads((newest / "state.json").read_text())
    assert set(state.pop("read")) == {"files", "parts"}
    content = json.dumps(state).encode()
    (newest / "state.json").write_bytes(content)
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    manifest["files"]["state.json"] = {
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (newest / "MANIFEST.json").write_text(json.dumps(manifest))
    assert attempt(stopped) == 0
    assert state_hashes(stopped) == state_hashes(runs.whole)


@pytest.mark.parametrize("where", [pytest.param("first", marks=pytest.mark.slow), "middle"])
def test_a_flipped_bit_in_the_tokenizer_is_healed_and_told(
    where: str, runs: Runs, stopped: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stopped.path / "tokenizer.json"
    intact = path.read_bytes()
    place = 0 if where == "first" else intact.index(b'"k"') + 1
    path.write_bytes(intact[:place] + bytes([intact[place] ^ 4]) + intact[place + 1 :])
    read(stopped.path)
    assert "is not the tokenizer that" in capsys.readouterr().err
    assert attempt(stopped) == 0
    assert [str(path) in w.message for w in told(stopped, events.Warning)].count(True) == 1
    assert path.read_bytes() == intact
    assert state_hashes(stopped) == state_hashes(runs.whole)
    read(stopped.path)
    assert capsys.readouterr().err == ""
