"""Runs of a tiny model, trained in this process, and what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memconsole.plan.plan import Plan, replace
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log.eventreader import EventReader
from memconsole_trainer.__main__ import run as run_attempt

TINY: dict[str, Any] = {
    "model.target_params": 200_000,
    "data.vocab_size": 300,
    "data.sequence_length": 16,
    "data.shuffle_buffer": 24,
    "data.validation_fraction": 0.2,
    "train.batch_size": 4,
    "train.epochs": 2,
    "train.log_every": 3,
    "train.learning_rate": 3e-3,
    "train.warmup_steps": 3,
    "train.weight_decay": 0.1,
    "train.sample_tokens": 4,
    "optimize.accumulation_steps": 2,
    "device.name": "cpu",
}


class StopAt(Attempt):
    """An attempt that is asked to stop when it has come to a step, or to a phase."""

    stop_at: Callable[[str, int], bool] = staticmethod(lambda phase, step: False)

    def progress(self, phase: str, step: int, bytes_written: int = 0) -> None:
        super().progress(phase, step, bytes_written)
        if self.stop_at(phase, step):
            self.stop_requested = True


def plan(text: Path, backend: str = "torch", **changes: Any) -> Plan:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(Plan(), {**TINY, "backend": backend, "data.source": str(text), **settings})


def attempt(run: RunDirectory, stop_at: Callable[[str, int], bool] | None = None) -> int:
    """Run one attempt in this process. Returns its exit code."""
    with StopAt(run, run.new_attempt()) as started:
        if stop_at is not None:
            started.stop_at = stop_at  # type: ignore[method-assign]
        return run_attempt(started)


def told(run: RunDirectory, kind: type[Any]) -> list[Any]:
    found = []
    for number in run.attempt_numbers():
        reader = EventReader(run.attempt_path(number))
        found += [record for record in reader.read() if isinstance(record, kind)]
    return found


def final(run: RunDirectory) -> dict[str, Any]:
    number = run.newest_attempt()
    assert number is not None
    content: dict[str, Any] = json.loads((run.attempt_path(number) / "final.json").read_text())
    return content


def state_hashes(run: RunDirectory) -> dict[str, str]:
    newest = run.committed_checkpoints()[-1]
    files = json.loads((newest / "MANIFEST.json").read_text())["files"]
    return {name: e["sha256"] for name, e in files.items() if name.endswith(".safetensors")}
