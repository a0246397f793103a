"""A paused run waits between two steps, is not counted as training, and goes on as if nothing had been."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventreader import EventReader
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.__main__ import run as run_attempt

PAUSE_SECONDS = 1.5
TINY: dict[str, Any] = {
    "model.target_params": 100_000,
    "data.vocab_size": 300,
    "data.sequence_length": 16,
    "train.batch_size": 4,
    "train.max_steps": 8,
    "train.log_every": 1,
    "train.sample_tokens": 4,
    "device.name": "cpu",
}


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Paused(Attempt):
    """Paused by someone when step 4 begins; let go on, or stopped, after a while."""

    stops = False
    _since: float | None = None

    def progress(self, phase: str, step: int, bytes_written: int = 0) -> None:
        super().progress(phase, step, bytes_written)
        mark = self.path / "paused"
        if phase == "train" and step == 4 and self._since is None:
            mark.touch()
        if phase == "paused":
            self._since = self._since or time.monotonic()
            assert step == 5, "the step under way is finished first"
            if time.monotonic() - self._since > PAUSE_SECONDS:
                if self.stops:
                    self.stop_requested = True
                else:
                    mark.unlink(missing_ok=True)


def made(tmp_path: Path, backend: str) -> RunDirectory:
    folder = tmp_path / "text"
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text("the cat sat on the mat while dogs ran over hills " * 40)
    settings = {**TINY, "backend": backend, "data.source": str(folder)}
    return create_run(replace(Plan(), settings))


def told(run: RunDirectory) -> list[Any]:
    return list(EventReader(run.attempt_path(1)).read(1 << 24))


def losses(records: list[Any]) -> list[float | None]:
    return [record.loss for record in records if isinstance(record, events.Step)]


def digest(run: RunDirectory) -> dict[str, str]:
    manifest = json.loads((run.committed_checkpoints()[-1] / "MANIFEST.json").read_text())
    return {k: e["sha256"] for k, e in manifest["files"].items() if k.endswith(".safetensors")}


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_paused_run_goes_on_to_the_same_end(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    whole, held = made(tmp_path, backend), made(tmp_path, backend)
    with Attempt(whole, whole.new_attempt()) as attempt:
        assert run_attempt(attempt) == 0
    with Paused(held, held.new_attempt()) as attempt:
        assert run_attempt(attempt) == 0
    records = told(held)
    phases = [r for r in records if isinstance(r, events.Phase)]
    at = next(n for n, r in enumerate(phases) if r.phase == "paused")
    assert phases[at + 1].phase == "train"
    assert phases[at + 1].time_boot - phases[at].time_boot >= PAUSE_SECONDS
    assert losses(records) == losses(told(whole))
    assert digest(held) == digest(whole)
    after = next(r for r in records if isinstance(r, events.Step) and r.step == 6)
    assert after.step_seconds < PAUSE_SECONDS, "waiting is not training"
    ended = next(r for r in records if isinstance(r, events.Ended))
    wall = records[-1].time_boot - records[0].time_boot
    assert ended.total_minutes * 60 <= wall - PAUSE_SECONDS


def test_a_paused_run_stops_when_asked_with_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run = made(tmp_path, "torch")
    with Paused(run, run.new_attempt()) as attempt:
        attempt.stops = True
        assert run_attempt(attempt) == 75
    assert run.committed_checkpoints()[-1].name.endswith("5")
    records = told(run)
    stopped = next(r for r in records if isinstance(r, events.Stopped))
    assert stopped.total_minutes is not None
    wall = records[-1].time_boot - records[0].time_boot
    assert 0 < stopped.total_minutes * 60 <= wall - PAUSE_SECONDS
