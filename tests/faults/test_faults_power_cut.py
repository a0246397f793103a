"""A power cut at any moment leaves a run that goes on from what it had said was saved."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from power_cut import Recorder, recording, restore

from memconsole.plan import plan_file
from memconsole.plan.plan import Plan
from memconsole.runs.act import restart
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.report.report import report
from memconsole.runs.record.checkpoints.manifest import step_of
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.weights.checkpoint import Checkpoints
from tests.training.harness import runs

SAVES = ((2, 1.0), (4, 0.5), (4, 0.25), (6, 0.75))
"""Step and value. One step is saved twice; the last checkpoint is not the best."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for thousands of folders: in memory, where the system has such a place."""
    monkeypatch.setattr("memconsole.runs.act.trainer.attempt.RESERVE_BYTES", 1000)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as new:
        monkeypatch.setenv("XDG_STATE_HOME", f"{new}/state")
        yield Path(new)


def cuts(recorder: Recorder, place: Path, *, few: bool) -> Iterator[tuple[Path, Any, str]]:
    """The different states that a power cut may leave, with what was promised and what was done."""
    chance, seen = random.Random(26), set()
    for moment in recorder.moments:
        for tree in recorder.states(moment, chance, few=few):
            key = hash((str(moment.promise), frozenset(tree.items())))
            if key not in seen:
                seen.add(key)
                state = place / str(len(seen))
                restore(tree, state)
                yield state, moment.promise, f"a power cut before: {moment.before}"
                shutil.rmtree(state)
    print(f"{len(seen)} states of {len(recorder.moments)} moments")


def save(checkpoints: Checkpoints, step: int, value: float) -> None:
    def tensors() -> Iterator[tuple[str, NDArray[np.generic]]]:
        yield "model.a", np.full(3, value, dtype=np.float32)
        yield "optimizer.m", np.full(3, value, dtype=np.float32)

    checkpoints.save(step, tensors(), {"validation_loss": value}, lambda: True, lambda size: None)


def newest(place: Path) -> tuple[int, float] | None:
    """Step and value that a trainer resumes from. Raises if a checkpoint looks whole and is not."""
    checkpoints, said = Checkpoints(place, 1), list[str]()
    checkpoints.sweep()
    stored = checkpoints.newest(said.append, lambda: None)
    assert not said
    return None if stored is None else (stored.step, float(stored.tensor("model.a")[0]))


def record_saves(place: Path, *, syncs: bool = True) -> Recorder:
    """Some saves in a folder of checkpoints. The promise is the last one that was committed."""
    place.mkdir()
    recorder = Recorder(place, syncs=syncs)
    with recording(recorder):
        checkpoints = Checkpoints(place, 1)
        for saved in SAVES:
            save(checkpoints, *saved)
            recorder.promise = saved
            checkpoints.retain()
    return recorder


def found_after_cuts(recorder: Recorder, place: Path, *, few: bool) -> set[tuple[Any, Any]]:
    """What was promised, and what was found. Raises if that is neither this nor the next save."""
    found = set()
    for state, promised, where in cuts(recorder, place, few=few):
        got = newest(state)
        following = SAVES[SAVES.index(promised) + 1 :][:1] if promised else SAVES[:1]
        assert got in {promised, *following}, where
        found.add((promised, got))
    return found


def test_a_power_cut_at_any_moment_of_a_save_leaves_the_last_checkpoint_or_this_one(
    folder: Path,
) -> None:
    recorder = record_saves(folder / "checkpoints")
    assert len(found_after_cuts(recorder, folder, few=False)) == 2 * len(SAVES) + 1


def test_without_syncing_a_power_cut_would_lose_checkpoints(folder: Path) -> None:
    recorder = record_saves(folder / "checkpoints", syncs=False)
    with pytest.raises(AssertionError):
        found_after_cuts(recorder, folder, few=True)


def record_run(place: Path) -> Recorder:
    """A small run with two attempts: its records, and checkpoints of a few numbers.

    The promise is what a user or a later attempt may rely on: the run's id, and the newest step.
    """
    place.mkdir()
    recorder = Recorder(place)
    with recording(recorder):
        run = create_run(Plan(), "a test")
        recorder.promise = (run.id, 0)
        follower = Follower(run)
        for number, steps in ((1, (1, 2)), (2, (3, 4))):
            assert run.new_attempt() == number
            with Attempt(run, number) as attempt:
                checkpoints = Checkpoints(run.checkpoints_path, 2)
                for step in steps:
                    save(checkpoints, step, 1.0)
                    checkpoints.retain()
                    told = events.Checkpoint(step=step, path="", size_bytes=1, seconds=0.0)
                    attempt.emit(told, durable=True)
                    recorder.promise = (run.id, step)
                    follower.save_state()
                attempt.finish(75, step, "stopped")
    return recorder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_power_cut_at_any_moment_of_a_run_leaves_a_run_that_can_be_read_and_resumed(
    few: bool, folder: Path
) -> None:
    found: set[tuple[int, int]] = set()
    chance = random.Random(26)
    for state, promised, where in cuts(record_run(folder / "state"), folder, few=few):
        if promised is None:
            continue
        name, step = promised
        run = RunDirectory(state / "memconsole/runs" / name)
        assert run.plan_path.read_text() == plan_file.dumps(Plan(), full=True), where
        assert run.name == "a test", where
        told = Follower(run).poll().facts.checkpoint
        assert (told.step if told else 0) >= step, where
        if chance.random() < 0.1:  # most of the time of this test
            report(run)
        restart.check_checkpoint(run)
        got = newest(run.checkpoints_path)
        found.add((step, got[0] if got else 0))
        assert run.new_attempt() <= 3
    assert found == {(step, step + more) for step in range(5) for more in (0, 1)} - {(4, 5)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_trainer_that_goes_on_after_a_power_cut_ends_with_the_same_bits(
    backend: str, text: Path, folder: Path
) -> None:
    pytest.importorskip(backend)
    settings = {"model__target_params": 100_000, "train__max_steps": 8}
    wanted = runs.plan(text, backend, train__checkpoint_every=2, **settings)
    (folder / "state").mkdir()
    recorder = Recorder(folder / "state")
    with recording(recorder):
        whole = create_run(wanted)
        recorder.promise = whole.id
        assert runs.attempt(whole) == 0
    expected, resumed = runs.state_hashes(whole), set()
    chance = random.Random(26)
    for state, name, where in cuts(recorder, folder, few=True):
        if name is not None and chance.random() < 0.05:
            run = RunDirectory(state / "memconsole/runs" / name)
            restart.check_checkpoint(run)
            assert runs.attempt(run) == 0, where
            assert runs.state_hashes(run) == expected, where
            resumed.add(runs.told(run, events.Started)[-1].resumed_step)
            assert step_of(run.committed_checkpoints()[-1]) == 8
    assert {0, 2, 4, 6} < resumed
