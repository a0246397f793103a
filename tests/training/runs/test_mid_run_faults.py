"""Data that fail while a preset trains: the run ends with one sentence, keeps its last step, and goes on when they are back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan import catalog
from memconsole.plan.data.made import Size, kind, parse_options
from memconsole.plan.plan import replace
from memconsole.runs.record.checkpoints.manifest import step_of
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.data.make.__main__ import make
from memconsole_trainer.data.make.maker import Request
from tests.training.harness.runs import attempt, final, told

BACKENDS = ("torch", "jax")
STEPS, FAULT_AT = 40, 4
MADE = {
    "lqr": ("lqr", "data.h5", Size(2000, None)),
    "gearhead-small": ("equipment", "data.jsonl", Size(1500, None)),
    "efficientids": ("ratings", "ratings", Size(6000, None)),
    "stories": ("text", "data.txt", Size(None, 400_000)),
}
"""The kind of data of each preset, its name, and how much of it."""
SMALL: dict[str, dict[str, Any]] = {
    "lqr": {"data.shuffle_buffer": 100},
    "gearhead-small": {"data.sequence_length": 64, "data.shuffle_buffer": 20},
    "efficientids": {"data.shuffle_buffer": 20},
    "stories": {"data.sequence_length": 32, "data.shuffle_buffer": 20},
}
EVERYWHERE: dict[str, Any] = {
    "device.name": "cpu",
    "data.cache_gib": 0,
    "train.max_steps": STEPS,
    "train.batch_size": 4,
    "train.log_every": 1,
    "train.evaluate_every": 1000,
    "train.evaluation_batches": 1,
    "train.checkpoint_every": 1000,
    "train.preflight": False,
    "train.sample_tokens": 0,
    "train.answered_records": 0,
}


def removed(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def truncated(path: Path) -> None:
    for file in files(path):
        os.truncate(file, file.stat().st_size // 3)


def overwritten(path: Path) -> None:
    """Everything but the beginning becomes 0xFF: NaN in fp32, and no text in UTF-8."""
    for file in files(path):
        size = file.stat().st_size
        with open(file, "r+b") as opened:
            opened.seek(size // 20)
            opened.write(b"\xff" * (size - size // 20))


def files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def copied(source: Path, into: Path) -> None:
    shutil.copytree(source, into) if source.is_dir() else shutil.copyfile(source, into)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the data of a preset, once."""
    folder, there = tmp_path_factory.mktemp("data"), dict[str, Path]()

    def of(preset: str) -> Path:
        if preset not in there:
            name, file, size = MADE[preset]
            there[preset] = folder / preset / file
            there[preset].parent.mkdir()
            make(Request(name, there[preset], size, 0, parse_options(kind(name), [])))
        return there[preset]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("fault", [removed, truncated, overwritten])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("preset", MADE)
def test_data_that_fail_while_a_preset_trains_cost_no_step(
    preset: str,
    backend: str,
    fault: Callable[[Path], None],
    data: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(backend)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    whole, path = data(preset), tmp_path / MADE[preset][1]
    copied(whole, path)
    own = {
        **EVERYWHERE,
        **SMALL[preset],
        "backend": backend,
        "data.source": str(path / "ratings.dat" if path.is_dir() else path),
    }
    run = create_run(replace(catalog.presets()[preset].plan, own))
    failed: list[int] = []

    def at(phase: str, step: int) -> bool:
        if step >= FAULT_AT and not failed:
            failed.append(step)
            fault(path)
        return False

    code = attempt(run, at)
    assert failed
    if code == 0:  # everything that it needed was read before
        assert told(run, events.Step)[-1].step == STEPS
        return
    message = told(run, events.Error)[-1].message
    assert path.name in message or "the data" in message, message
    assert "\n" not in message
    assert "Traceback" not in message
    assert kept(run) == told(run, events.Step)[-1].step, final(run)
    if path.exists():
        removed(path)
    copied(whole, path)
    assert attempt(run) == 0, final(run)
    assert told(run, events.Step)[-1].step == STEPS
    assert [e.step for e in told(run, events.Step)] == list(range(1, STEPS + 1))


def kept(run: RunDirectory) -> int:
    return step_of(run.committed_checkpoints()[-1])
