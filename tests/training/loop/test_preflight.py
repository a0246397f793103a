"""The preflight finds late failures before the first step, and leaves no trace in what is trained."""

from __future__ import annotations

import errno
import json
import random
import re
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from memconsole.plan import catalog
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks.language import MASKED
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.read.report.report import report
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures.failure import ExitCode
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventreader import EventReader
from memconsole.runs.record.records import ErrorRecord
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.__main__ import run as run_attempt
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.engine import Batch
from memconsole_trainer.loop import preflight
from memconsole_trainer.weights import checkpoint

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "over", "green", "hills"]
Said = list[Any]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    source = random.Random(1)
    for number in range(8):
        words = (source.choice(WORDS) for _ in range(90))
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(autouse=True)
def own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def plan(text: Path, backend: str, **changes: Any) -> Plan:
    settings = {
        "backend": backend, "device.name": "cpu", "data.source": str(text), "data.vocab_size": 300,
        "model.target_params": 200_000, "data.sequence_length": 16, "data.shuffle_buffer": 24,
        "data.validation_fraction": 0.2, "train.batch_size": 4, "train.max_steps": 5,
        "train.log_every": 1, "train.warmup_steps": 2, "train.learning_rate": 3e-3,
        "train.sample_tokens": 0, "optimize.accumulation_steps": 2,
    } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
    return replace(Plan(), settings)


def trained(plan: Plan) -> tuple[RunDirectory, int, Said]:
    run = create_run(plan)
    with Attempt(run, run.new_attempt()) as attempt:
        code = run_attempt(attempt)
    return run, code, list(EventReader(run.attempt_path(1)).read())


def hashes(run: RunDirectory) -> dict[str, str]:
    manifest = json.loads((run.committed_checkpoints()[-1] / "MANIFEST.json").read_text())
    found = manifest["files"].items()
    return {name: e["sha256"] for name, e in found if name.endswith(".safetensors")}


def parts(said: Said) -> list[str]:
    found = [e for e in said if isinstance(e, events.Phase) and e.phase == "preflight"]
    return [e.detail for e in found]


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("torch", {}),
        ("torch", {"optimize__precision": "fp16", "optimize__optimizer": "adafactor"}),
        ("torch", {"optimize__precision": "bf16-sr", "optimize__optimizer": "adamw-8bit"}),
        (
            "torch",
            {"optimize__optimizer_in_backward": True, "train__grad_clip": 0.0,
             "optimize__accumulation_steps": 1, "optimize__optimizer": "muon"},
        ),
        (
            "torch",
            {"optimize__lora_rank": 4, "optimize__freeze_base": True, "train__ema_decay": 0.9,
             "model__weights": "random"},
        ),
        ("jax", {}),
        ("jax", {"optimize__precision": "fp16", "optimize__optimizer": "adamw-8bit", "train__ema_decay": 0.9}),
        ("jax", {"optimize__precision": "bf16-sr", "optimize__optimizer": "muon"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)  # fmt: skip
def test_a_run_is_to_the_bit_what_it_is_without_a_preflight(
    backend: str, changes: dict[str, Any], text: Path
) -> None:
    pytest.importorskip(backend)
    found = []
    for rehearsed in (True, False):
        run, code, said = trained(plan(text, backend, train__preflight=rehearsed, **changes))
        assert code == 0, [e for e in said if isinstance(e, events.Error)]
        assert bool(parts(said)) == rehearsed
        steps = [(e.step, e.loss, e.tokens) for e in said if isinstance(e, events.Step)]
        assert len(steps) == 5
        losses = [e.loss for e in said if isinstance(e, events.Evaluation)]
        found.append((steps, losses, hashes(run)))
        assert not (run.path / "preflight").exists()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("default", "2 x 4 rows of 16 tokens"),
        ("lqr", "2 x 4 windows"),
        ("efficientids", "2 x 4 rows of 16 items"),
    ],
)
def test_the_size_of_a_step_is_told_in_the_words_of_the_task(preset: str, words: str) -> None:
    assert preflight._size(catalog.preset(preset), BatchShape(2, 4, 16)) == words


def test_each_part_is_told_in_its_phase_with_its_memory(text: Path) -> None:
    pytest.importorskip("torch")
    _, _, said = trained(plan(text, "torch"))
    told = parts(said)
    order = [told.index(part) for part in ("checkpoint", "evaluation")]
    assert order == sorted(order)
    measured = [e for e in said if isinstance(e, events.Memory) and e.phase == "preflight"]
    assert measured
    assert measured[-1].peak_bytes
    first = next(i for i, e in enumerate(said) if isinstance(e, events.Step))
    last = max(
        i for i, e in enumerate(said) if isinstance(e, events.Phase) and e.phase == "preflight"
    )
    assert last < first


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("isolated", [False, True], ids=["too little text", "short records"])
def test_the_step_that_is_rehearsed_is_as_long_as_any_whatever_the_data_begins_with(
    backend: str, isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)
    short, long = tmp_path / "short.jsonl", tmp_path / "long.txt"
    short.write_text('{"said": "the cat sat"}\n' * 40)
    long.write_text("the cat sat " * 12)
    engine = import_module(f"memconsole_{backend}.engine")
    kind = engine.TorchEngine if backend == "torch" else engine.JaxEngine
    seen: list[Batch] = []
    real = kind.train_step

    def recorded(self: Any, batch: Batch) -> None:
        seen.append(batch)
        real(self, batch)

    monkeypatch.setattr(kind, "train_step", recorded)
    changes = {"train__max_steps": 1, "data__isolate_documents": isolated, "train__batch_size": 3}
    changes |= {"data__template": "{{ said }}"} if isolated else {}
    source = short if isolated else long
    _, code, said = trained(plan(source, backend, data__validation_fraction=0.0, **changes))
    assert code == 0, [e for e in said if isinstance(e, events.Error)]
    assert "training step" in parts(said)
    rehearsed, first = seen
    assert (first["targets"] == MASKED).mean() > 0.1
    assert rehearsed["inputs"].shape == rehearsed["targets"].shape == (2, 3, 16)
    assert not (rehearsed["targets"] == MASKED).any()
    assert ("documents" in rehearsed.arrays) == isolated


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_first_step_is_the_rehearsal_if_its_rows_are_full(
    backend: str, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)
    engine = import_module(f"memconsole_{backend}.engine")
    kind = engine.TorchEngine if backend == "torch" else engine.JaxEngine
    real, taken = kind.train_step, []

    def counted(self: Any, batch: Batch) -> None:
        taken.append(batch)
        real(self, batch)

    monkeypatch.setattr(kind, "train_step", counted)
    _, code, said = trained(plan(text, backend, train__max_steps=3))
    assert code == 0, [e for e in said if isinstance(e, events.Error)]
    assert not (taken[0]["targets"] == MASKED).any()
    assert len(taken) == 3
    assert "training step" not in parts(said)
    assert parts(said)[-1] == "checkpoint"


def test_a_resumed_run_is_not_rehearsed_again(text: Path) -> None:
    pytest.importorskip("torch")
    run, _, _ = trained(plan(text, "torch", train__max_steps=2, train__checkpoint_every=1))
    newest = run.committed_checkpoints()[-1]
    for stale in (newest,):
        for file in stale.iterdir():
            file.unlink()
        stale.rmdir()
    with Attempt(run, run.new_attempt()) as attempt:
        assert run_attempt(attempt) == 0
    assert not parts(list(EventReader(run.attempt_path(2)).read()))


def failure(run: RunDirectory) -> ErrorRecord:
    found = files.read_struct(run.attempt_path(1) / "error.json", ErrorRecord)
    assert found is not None
    assert found.step == 0
    return found


@pytest.mark.parametrize(
    ("method", "part", "remedy"),
    [
        ("evaluate", "evaluation (1 rows of 16 tokens)", "train.evaluation_batch_size"),
        ("train_step", "training step (2 x 4 rows of 16 tokens)", "on_out_of_memory = halve"),
    ],
)
def test_what_runs_out_of_memory_is_named_with_its_remedy(
    method: str, part: str, remedy: str, text: Path
) -> None:
    pytest.importorskip("torch")
    from memconsole_torch.engine import TorchEngine

    def fails(*_: Any) -> None:
        raise MemoryError("tried to allocate 3 GiB")

    with patch.object(TorchEngine, method, fails):
        run, code, said = trained(plan(text, "torch", train__evaluation_batch_size=1))
    assert code == ExitCode.FAILED
    error = failure(run)
    assert error.cause == "out_of_memory"
    said_first, helps, framework = error.message.splitlines()
    assert said_first == f"the {part} asked for 3.00 GiB, more memory than is left"
    assert remedy in helps
    assert framework == "tried to allocate 3 GiB"
    assert not [e for e in said if isinstance(e, events.Step)]
    told = next(e for e in said if isinstance(e, events.Error))
    assert told.requested_bytes == 3 * 2**30
    assert [e.phase for e in said if isinstance(e, events.Phase)][-1] == "preflight"


def test_a_disk_without_room_for_a_checkpoint_ends_the_run_before_its_first_step(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("memconsole_trainer.loop.preflight.DISK_WAIT_SECONDS", 0.0)
    real = checkpoint.shutil.disk_usage

    def full(path: Path) -> Any:
        return real(path)._replace(free=500_000)

    with patch.object(checkpoint.shutil, "disk_usage", full):
        run, code, said = trained(plan(text, "torch"))
    assert code == ExitCode.DISK_FULL
    error = failure(run)
    assert error.cause == "disk"
    assert "preflight: checkpoint" in error.message
    assert str(run.path / "preflight") in error.message
    assert re.search(r"488 KiB free, a checkpoint needs 2\.\d+ MiB", error.message)
    assert "free some room" in error.message
    assert not [e for e in said if isinstance(e, events.Step)]


def test_a_run_that_waits_for_its_first_checkpoint_says_that_it_will_end(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("memconsole_trainer.loop.saving.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("memconsole_trainer.loop.preflight.DISK_WAIT_SECONDS", 2.0)
    real = checkpoint.shutil.disk_usage

    def full(path: Path) -> Any:
        return real(path)._replace(free=500_000)

    with patch.object(checkpoint.shutil, "disk_usage", full):
        _, code, said = trained(plan(text, "torch"))
    assert code == ExitCode.DISK_FULL
    (told,) = [e.message for e in said if isinstance(e, events.Warning)]
    assert told.endswith("the run ends if it cannot be written within 2.0 s")


def test_a_rehearsal_is_not_training_time(text: Path) -> None:
    pytest.importorskip("torch")
    run, code, said = trained(plan(text, "torch"))
    assert code == 0
    (ended,) = [e for e in said if isinstance(e, events.Ended)]
    rehearsed = max(
        e.time_boot for e in said if isinstance(e, events.Phase) and e.phase == "preflight"
    )
    assert 0 < ended.total_minutes * 60 <= ended.time_boot - rehearsed
    assert report(run).total_minutes == ended.total_minutes


def test_room_for_the_first_checkpoint_alone_is_a_warning(text: Path) -> None:
    pytest.importorskip("torch")
    real, asked = checkpoint.shutil.disk_usage, []

    def scarce(path: Path) -> Any:
        asked.append(path)
        return real(path)._replace(free=6_000_000)

    with patch.object(checkpoint.shutil, "disk_usage", scarce):
        _, code, said = trained(plan(text, "torch", train__keep_checkpoints=50))
    assert code == 0
    assert any(
        "lower train.keep_checkpoints" in e.message for e in said if isinstance(e, events.Warning)
    )


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(text: Path) -> None:
    pytest.importorskip("torch")

    def refused(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with patch.object(checkpoint.tensorfile, "write", refused):
        run, code, _ = trained(plan(text, "torch"))
    assert code == ExitCode.FAILED
    assert "a folder it can write to" in failure(run).message
