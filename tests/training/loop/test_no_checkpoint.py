"""A run whose checkpoints are all damaged is refused by name, and begins again only when asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from memconsole.runs.act import launch, restart
from memconsole.runs.record.checkpoints import manifest, verified
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.weights.checkpoint import Checkpoints
from tests.training.harness.runs import attempt, final, plan, state_hashes, told


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def damage(run: RunDirectory) -> list[str]:
    """Flip one bit of each checkpoint's weights; the names of the checkpoints."""
    for path in run.committed_checkpoints():
        file = path / "model-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-5] ^= 4
        file.write_bytes(content)
    return [path.name for path in run.committed_checkpoints()]


def test_with_no_intact_checkpoint_left_a_resume_is_refused_until_asked_to_begin_again(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = create_run(plan(text)), create_run(plan(text))
    assert attempt(run, lambda phase, step: step >= 4) == 75
    assert attempt(whole, lambda phase, step: step >= 4) == 75
    started: list[str] = []
    monkeypatch.setattr(launch, "start_supervisor", lambda run, mode: started.append(mode) or 2)

    with pytest.raises(RunError, match="has an intact checkpoint"):
        launch.resume(run, from_scratch=True)
    names = damage(run)
    with pytest.raises(RunError, match="no intact checkpoint is left") as refused:
        launch.resume(run)
    for name in names:
        assert f"{name} is damaged (model-00001.safetensors does not match" in str(refused.value)
    assert "--from-scratch" in str(refused.value)
    assert not started

    # A trainer that is started all the same, as after an out-of-memory error, refuses too.
    assert attempt(run) == 77
    assert final(run)["reason"] == "bad_data"
    assert names[-1] in told(run, events.Error)[0].message
    assert attempt(run) == 77, "nor does it the second time, when they are all called damaged"
    with pytest.raises(RunError, match=r"step-000000004.BAD is damaged"):
        launch.resume(run)

    launch.resume(run, from_scratch=True)
    assert started == ["--resume"]
    assert attempt(run, lambda phase, step: step >= 4) == 75
    assert told(run, events.Started)[-1].resumed_step == 0
    assert state_hashes(run) == state_hashes(whole)
    launch.resume(run)


def test_checkpoints_that_are_gone_are_missed(text: Path) -> None:
    run = create_run(plan(text))
    restart.check_checkpoint(run)
    assert attempt(run, lambda phase, step: phase == "data") == 75
    restart.check_checkpoint(run)
    assert attempt(run, lambda phase, step: step >= 2) == 75
    shutil.rmtree(run.checkpoints_path)
    with pytest.raises(RunError, match="that of step 2 is not there"):
        launch.resume(run)


def test_a_resume_hashes_a_checkpoint_once_and_again_if_it_was_touched_since(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hashed = create_run(plan(text)), list[str]()
    assert attempt(run, lambda phase, step: step >= 2) == 75
    newest, real = run.committed_checkpoints()[-1], manifest._sha256

    def counted(path: Path, beat: Callable[[], None] | None) -> str:
        hashed.append(path.name)
        return real(path, beat)

    monkeypatch.setattr(manifest, "_sha256", counted)
    monkeypatch.setattr(launch, "start_supervisor", lambda run, mode: 2)
    launch.resume(run)
    files = ["model-00001.safetensors", "optimizer-00001.safetensors", "state.json"]
    assert sorted(hashed) == files
    assert Checkpoints(run.checkpoints_path, 2).newest(
        pytest.fail, lambda: None, verified=verified.take(run)
    )
    assert sorted(hashed) == files

    launch.resume(run)
    hashed.clear()
    (newest / files[0]).touch()
    unchanged = verified.take(run)
    assert not unchanged(newest)
    assert not verified.take(run)(newest), "a note is used once"
    launch.resume(run)
    damage(run)
    assert attempt(run) == 77, "what is damaged after the note is found"
