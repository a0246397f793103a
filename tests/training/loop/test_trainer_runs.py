"""Whole runs of the trainer with the real engines: stopped, resumed, failing, and bitwise the same."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from memconsole.memory.run_time import run_steps
from memconsole.plan import catalog
from memconsole.plan.machine.processor import slower_than_fp32
from memconsole.plan.plan import replace
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.read.report.report import report
from memconsole.runs.record.checkpoints.manifest import step_of
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.__main__ import run as run_attempt
from memconsole_trainer.control.plain import Plain
from memconsole_trainer.data.text.tokens.tokenizer import train
from memconsole_trainer.engine import Engine, StepMetrics
from tests.training.harness.runs import attempt, final, plan, state_hashes, told


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def progress_of(run: RunDirectory) -> dict[str, Any]:
    state = json.loads((run.committed_checkpoints()[-1] / "state.json").read_text())["progress"]
    return {k: v for k, v in state.items() if "seconds" not in k and "minutes" not in k}


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_stopping_and_resuming_at_several_steps_ends_bitwise_where_an_uninterrupted_run_ends(
    backend: str, text: Path
) -> None:
    pytest.importorskip(backend)
    whole, broken = create_run(plan(text, backend)), create_run(plan(text, backend))
    assert attempt(whole) == 0
    total = final(whole)["step"]
    assert total > 12
    stops = (1, 4, total // 2, total // 2 + 1, total - 1)
    for stop in stops if backend == "torch" else stops[1::2]:  # compiling takes seconds
        assert attempt(broken, lambda phase, step, stop=stop: step >= stop) == 75
        assert final(broken)["step"] == stop
        assert final(broken)["checkpoint"].endswith(f"step-{stop:09d}")
    assert attempt(broken) == 0
    assert state_hashes(broken) == state_hashes(whole)
    assert progress_of(broken) == progress_of(whole)
    last, expected = told(broken, events.Evaluation)[-1], told(whole, events.Evaluation)[-1]
    assert last.loss == expected.loss
    assert last.metrics == expected.metrics
    assert last.train_loss == expected.train_loss is not None
    ended = told(broken, events.Ended)
    assert len(ended) == 1
    assert ended[0].epochs == 2
    assert ended[0].final_train_loss == told(whole, events.Ended)[0].final_train_loss
    first = [e.train_loss for e in told(whole, events.Epoch)]
    assert [e.train_loss for e in told(broken, events.Epoch)] == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_story_of_a_run_is_told_completely(
    streaming: bool, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = plan(text, data__streaming=streaming)
    run = create_run(wanted)
    assert attempt(run) == 0
    phases = {p.phase for p in told(run, events.Phase)}
    expected = {"import", "data", "tokenizer", "build", "compile", "train"}
    assert phases >= expected | {"evaluate", "sample", "checkpoint"}
    announced = [p for p in told(run, events.Phase) if p.total_steps is not None]
    ended = told(run, events.Ended)[0]
    assert announced[-1].total_steps == ended.step
    assert announced[-1].steps_per_epoch * 2 == ended.step
    assert run_steps(wanted, catalog.model(wanted)) == ended.step, "what a run counted, plans know"
    steps = told(run, events.Step)
    assert [s.step for s in steps] == sorted({s.step for s in steps})
    assert {1, 3, 6, 9, ended.step} <= {s.step for s in steps}
    assert steps[-1].loss < steps[0].loss - 1.0
    assert steps[0].loss == pytest.approx(np.log(300), abs=0.4)
    evaluations = told(run, events.Evaluation)
    assert len(evaluations) == 2
    assert [e.best for e in evaluations] == [True, evaluations[1].loss < evaluations[0].loss]
    assert evaluations[-1].loss < evaluations[-1].metrics["unigram_loss"] + 1.0
    bits = evaluations[0].bits_per_byte
    assert 0 < bits < 8
    assert [e.epoch for e in told(run, events.Epoch)] == [1, 2]
    assert all(e.minutes > 0 for e in told(run, events.Epoch))
    memory = {m.phase: m for m in told(run, events.Memory)}
    assert {"build", "train", "evaluate", "checkpoint", "sample"} <= set(memory)
    assert all(m.peak_bytes >= m.allocated_bytes >= 0 for m in memory.values())
    assert memory["train"].peak_host_bytes >= memory["train"].host_bytes > 50e6
    checkpoints = told(run, events.Checkpoint)
    assert checkpoints[0].step == 1
    assert Path(checkpoints[-1].path) == run.committed_checkpoints()[-1]
    assert all(s.text for s in told(run, events.Sample))
    printed = capsys.readouterr().out
    for words in ("Epoch 2/2 Summary", "Train Loss:", "Epoch Time:", "TRAINING COMPLETE!"):
        assert words in printed
    assert f"Best Validation Loss:        {ended.best_validation_loss:.6f}" in printed


def test_tokens_are_counted_once_each_epoch(text: Path) -> None:
    run = create_run(plan(text, data__streaming=False))
    assert attempt(run) == 0
    tokens = json.loads((run.committed_checkpoints()[-1] / "state.json").read_text())
    counted = tokens["progress"]["tokens"]
    assert told(run, events.Step)[-1].tokens == counted
    assert counted % 2 == 0  # two epochs of all train tokens but the very first
    said = [p for p in told(run, events.Phase) if p.steps_per_epoch]
    per_step = 2 * 4 * 16
    assert (
        (said[0].steps_per_epoch - 1) * per_step < counted / 2 <= said[0].steps_per_epoch * per_step
    )


def test_max_steps_decides_the_length_alone_and_repeats_short_data(text: Path) -> None:
    run = create_run(plan(text, train__max_steps=25, train__epochs=1, train__evaluate_every=10))
    assert attempt(run) == 0
    assert final(run)["step"] == 25
    each = next(p.steps_per_epoch for p in told(run, events.Phase) if p.steps_per_epoch)
    evaluated = [e.step for e in told(run, events.Evaluation)]
    assert evaluated == sorted({10, 20, 25, each, 2 * each})
    assert told(run, events.Step)[-1].epoch >= 2


@pytest.mark.parametrize("phase", ["import", "data", "tokenizer", "build", "compile", "evaluate"])
def test_a_stop_in_any_phase_leaves_something_that_resumes_to_the_same_end(
    phase: str, text: Path
) -> None:
    run, whole = (create_run(plan(text, train__epochs=1)) for _ in range(2))
    assert attempt(whole) == 0
    assert attempt(run, lambda now, step: now == phase) == 75
    assert final(run)["reason"] == "stopped"
    assert len(told(run, events.Stopped)) == 1
    assert attempt(run) == 0
    assert state_hashes(run) == state_hashes(whole)
    assert len(told(run, events.Epoch)) == 1


@pytest.mark.parametrize("phase", ["import", "data", "build"])
def test_an_attempt_that_ends_in_its_set_up_says_where_the_run_stands(
    phase: str, text: Path
) -> None:
    run = create_run(plan(text))
    assert attempt(run, lambda now, step: step >= 4) == 75
    checkpoint = final(run)["checkpoint"]
    assert attempt(run, lambda now, step: now == phase) == 75
    assert told(run, events.Stopped)[-1].step == 4
    assert (final(run)["step"], final(run)["checkpoint"]) == (4, checkpoint)
    changed = run.plan_path.read_text().replace("weight_decay = 0.1", "weight_decay = 0.2")
    run.plan_path.write_text(changed)
    assert attempt(run) == 78
    assert (final(run)["step"], final(run)["checkpoint"]) == (4, checkpoint)


def test_a_warm_up_cut_short_is_told_once(text: Path) -> None:
    run = create_run(plan(text, train__warmup_steps=13, train__epochs=1, train__max_steps=20))
    assert attempt(run, lambda phase, step: step >= 3) == 75
    assert attempt(run) == 0
    told_of = [w.message for w in told(run, events.Warning) if "warmup_steps" in w.message]
    assert told_of == [
        "train.warmup_steps = 13 is more than half of the 20 steps of this run: the warm-up takes 2"
    ]
    rates = {s.step: s.learning_rate for s in told(run, events.Step)}
    assert rates[1] == pytest.approx(1.5e-3)
    assert rates[3] == pytest.approx(3e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_processor_that_is_slow_in_16_bits_is_told_of(
    precision: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "cpuinfo"
    old.write_text("flags : fpu sse2 avx2\n")
    here = partial(slower_than_fp32, cpuinfo=old)
    monkeypatch.setattr("memconsole_trainer.loop.setup.slower_than_fp32", here)
    run = create_run(plan(text, optimize__precision=precision))
    assert attempt(run, lambda phase, step: phase == "data") == 75
    slow = [w.message for w in told(run, events.Warning) if "far slower" in w.message]
    words = "this CPU has no avx512_bf16, so that training is far slower than in fp32"
    assert slow == ([] if precision == "fp32" else [f"optimize.precision = bf16: {words}"])


def test_every_epoch_ends_with_an_evaluation_of_its_last_step(text: Path) -> None:
    run = create_run(plan(text, train__evaluate_every=4))
    assert attempt(run) == 0
    evaluated = {e.step: e.loss for e in told(run, events.Evaluation)}
    each = final(run)["step"] // 2
    assert each % 4
    assert sorted({4, 8, each, 12, 16, 2 * each}) == list(evaluated)
    losses = [e.validation_loss for e in told(run, events.Epoch)]
    assert losses == [evaluated[each], evaluated[2 * each]]


def test_the_final_train_loss_is_what_the_last_step_says(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, broken = (create_run(plan(text, train__log_every=4)) for _ in range(2))
    assert attempt(run) == 0
    printed = capsys.readouterr().out
    steps = {s.step: s.loss for s in told(run, events.Step)}
    ended, last = told(run, events.Ended)[0], told(run, events.Epoch)[-1]
    assert ended.final_train_loss == steps[ended.step] == report(run).final_train_loss
    assert ended.final_train_loss != last.train_loss
    assert f"Final Training Loss:         {ended.final_train_loss:.6f} (last steps)" in printed
    assert f"Train Loss:     {last.train_loss:.6f} (mean of the epoch)" in printed
    assert attempt(broken, lambda phase, step: step >= 7) == 75
    assert attempt(broken) == 0
    resumed = {s.step: s.loss for s in told(broken, events.Step)}
    assert {step: resumed[step] for step in steps} == steps


def test_one_short_file_is_validated_and_sampled(text: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(p.read_text() + "\n" for p in text.iterdir()))
    run = create_run(plan(tmp_path / "one.txt", train__epochs=1))
    assert attempt(run) == 0
    evaluation = told(run, events.Evaluation)[-1]
    assert evaluation.loss > 0
    assert evaluation.metrics["unigram_loss"] > 0
    assert len(told(run, events.Sample)) == 1
    alone = create_run(plan(tmp_path / "one.txt", train__epochs=1, data__validation_fraction=0.0))
    assert attempt(alone) == 0
    assert told(alone, events.Evaluation) == []
    assert [s.step for s in told(alone, events.Sample)] == [final(alone)["step"]]


def test_a_finished_run_resumed_is_finished_at_once(text: Path) -> None:
    run = create_run(plan(text, train__epochs=1))
    assert attempt(run) == 0
    before = state_hashes(run)
    assert attempt(run) == 0
    assert state_hashes(run) == before
    assert len(told(run, events.Ended)) == 2


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(text: Path) -> None:
    run, whole = (create_run(plan(text, train__checkpoint_every=4)) for _ in range(2))
    assert attempt(whole) == 0
    assert attempt(run, lambda phase, step: step >= 10) == 75
    before, newest = run.committed_checkpoints()[-2:]
    shard = newest / "optimizer-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-7] ^= 1
    shard.write_bytes(data)
    assert attempt(run) == 0
    assert any("optimizer-00001.safetensors" in w.message for w in told(run, events.Warning))
    assert [s.resumed_step for s in told(run, events.Started)] == [0, step_of(before)]
    assert state_hashes(run) == state_hashes(whole)


def test_the_error_names_the_step_whose_loss_counts_and_is_not_finite(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of an undone step before it does not count, so the error does not name that one."""
    take = Plain.take_metrics

    def undone_then_failed(self: Plain, engine: Engine) -> list[StepMetrics]:
        undone, failed = {"loss": math.nan, "undone": True}, {"loss": math.nan}
        changes = {5: undone, 6: failed}
        return [dataclasses.replace(m, **changes.get(m.step, {})) for m in take(self, engine)]

    monkeypatch.setattr(Plain, "take_metrics", undone_then_failed)
    run = create_run(plan(text))
    assert attempt(run) == 80
    assert "the loss of step 6 is not finite" in told(run, events.Error)[0].message


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = plan(text, train__learning_rate=10.0, train__grad_clip=0.0, optimize__optimizer="sgd")
    run = create_run(replace(wild, {"train.warmup_steps": 0, "train.epochs": 20}))
    assert attempt(run) == 80
    assert final(run)["reason"] == "nan"
    error = told(run, events.Error)[0]
    assert error.cause == "nan"
    assert "train.learning_rate" in error.message
    assert "fp32" not in error.message  # it is fp32 already
    assert "Traceback" not in capsys.readouterr().err
    assert told(run, events.Step)[-1].loss is None
    kept = run.committed_checkpoints()
    assert kept
    for path in kept:
        for name in ("model-00001.safetensors", "optimizer-00001.safetensors"):
            from safetensors.numpy import load_file

            tensors = load_file(path / name)
            assert all(np.isfinite(t).all() for t in tensors.values() if t.dtype.kind == "f")


def test_changed_data_and_changed_settings_refuse_to_continue(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for path in text.iterdir():
        (folder / path.name).write_text(path.read_text())
    run = create_run(plan(folder))
    assert attempt(run, lambda phase, step: step >= 2) == 75
    (folder / "03.txt").write_text("something else entirely " * 30)
    assert attempt(run) == 77
    assert "data has changed" in told(run, events.Error)[-1].message
    (folder / "03.txt").write_text((text / "03.txt").read_text())
    changed = run.plan_path.read_text().replace("weight_decay = 0.1", "weight_decay = 0.2")
    run.plan_path.write_text(changed)
    assert attempt(run) == 78
    message = told(run, events.Error)[-1].message
    assert "other settings than the run's plan.toml has now" in message
    assert "(train.weight_decay 0.1 → 0.2); put plan.toml back as it was" in message
    run.plan_path.write_text("")
    assert attempt(run) == 78
    assert "plan.toml: is empty; put it back as it was" in told(run, events.Error)[-1].message


def test_bad_data_and_bad_plans_have_their_exit_codes(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 not really")
    run = create_run(plan(path))
    assert attempt(run) == 77
    assert final(run)["reason"] == "bad_data"
    run = create_run(plan(text, data__tokenizer=str(tmp_path / "none.json"), data__vocab_size=300))
    assert attempt(run) == 78
    assert final(run)["reason"] == "bad_plan"


@pytest.mark.parametrize("damage", ["truncated", "missing shard", "index"])
def test_damaged_pretrained_weights_are_a_bad_plan_in_one_line(
    damage: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    train(["words"], 300).save(folder / "tokenizer.json")
    index = folder / "model.safetensors.index.json"
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"\x80" + bytes(7) + b"{")
    elif damage == "missing shard":
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": "a.safetensors"}}))
    else:
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": ["a.safetensors"]}}))
    run = create_run(plan(text, model__name=str(folder), model__target_params=None))
    assert attempt(run) == 78
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1
    assert printed[0].startswith(f"memconsole: {folder}")
    assert told(run, events.Error)[0].cause == "bad_plan"


def test_running_out_of_memory_is_told_as_such(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pytest.importorskip("memconsole_torch.engine")

    def full(self: Any, batch: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr(engine.TorchEngine, "train_step", full)
    run = create_run(plan(text))
    assert attempt(run) == 1
    assert told(run, events.Error)[0].cause == "out_of_memory"
    assert final(run)["reason"] == "out_of_memory"


def test_a_fenced_attempt_commits_nothing(text: Path) -> None:
    run = create_run(plan(text))

    class Overtaken(Attempt):
        def is_newest(self) -> bool:
            return self.step < 1 and super().is_newest()

    with Overtaken(run, run.new_attempt()) as started:
        assert run_attempt(started) == 76
    assert run.committed_checkpoints() == []


def test_a_full_disk_is_waited_for_and_training_goes_on(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memconsole_trainer.weights import checkpoint

    full = iter([10**18, 10**18])
    monkeypatch.setattr("memconsole_trainer.loop.saving.RETRY_SECONDS", 0.0)
    real = checkpoint.Checkpoints._check_room

    def preflight(self: Any, expected: int) -> None:
        real(self, next(full, expected))

    monkeypatch.setattr(checkpoint.Checkpoints, "_check_room", preflight)
    run = create_run(plan(text, train__epochs=1))
    assert attempt(run) == 0
    assert [p.phase for p in told(run, events.Phase)].count("wait_disk") == 1
    assert "a checkpoint cannot be written" in told(run, events.Warning)[0].message


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EIO])
def test_a_stop_while_the_disk_fails_keeps_the_state_until_it_can_be_written(
    problem: int, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memconsole_trainer.weights import checkpoint

    left = [3]

    def failing(self: Any, expected: int) -> None:
        if run.committed_checkpoints() and left[0]:
            left[0] -= 1
            raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr(checkpoint.Checkpoints, "_check_room", failing)
    monkeypatch.setattr("memconsole_trainer.loop.saving.RETRY_SECONDS", 0.01)
    run = create_run(plan(text, train__preflight=False))
    assert attempt(run, lambda phase, step: step >= 5) == 75
    assert left == [0]
    assert final(run)["checkpoint"].endswith("step-000000005")
    messages = [warning.message for warning in told(run, events.Warning)]
    assert os.strerror(problem) in messages[0]
    assert "the checkpoint of step 5 is written" in messages[1]


def test_token_rows_train_without_a_tokenizer(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    rows = np.random.default_rng(1).integers(0, 200, (120, 17))
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("tokens", data=rows, chunks=(16, 17))
    run = create_run(plan(tmp_path / "rows.h5", train__epochs=1))
    assert attempt(run) == 0
    assert told(run, events.Evaluation)[0].bits_per_byte is None
    sample = told(run, events.Sample)[0]
    assert all(0 <= int(word) < 300 for word in sample.text.split())
    wide = create_run(
        plan(tmp_path / "rows.h5", data__sequence_length=8, train__epochs=1, data__streaming=False)
    )
    assert attempt(wide) == 0
    held = told(wide, events.Evaluation)[0].tokens
    seen = told(wide, events.Step)[-1].tokens
    assert held + seen == 120 * 16  # two windows a row, each target once
    too_long = create_run(plan(tmp_path / "rows.h5", data__sequence_length=32))
    assert attempt(too_long) == 78
    assert "hold 17 tokens; use 16" in told(too_long, events.Error)[0].message


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_sigterm_to_the_real_process_checkpoints_and_kill_9_loses_nothing_committed(
    backend: str, text: Path
) -> None:
    pytest.importorskip(backend)
    settings = {"train__epochs": 400, "train__max_steps": 40, "train__checkpoint_every": 5}
    run, whole = (create_run(plan(text, backend, **settings)) for _ in range(2))

    def start() -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "memconsole_trainer",
            str(run.path),
            str(run.new_attempt()),
        ]
        return subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
        )

    def after_step(process: subprocess.Popen[bytes], step: int, number: signal.Signals) -> int:
        begun = max(committed(run), default=0)
        while process.poll() is None:
            if any(checkpoint >= step and checkpoint > begun for checkpoint in committed(run)):
                process.send_signal(number)
                break
            time.sleep(0.05)
        return process.wait(timeout=120)

    if backend == "torch":
        assert after_step(start(), 5, signal.SIGKILL) in (-signal.SIGKILL, 0)
    code = after_step(start(), 20, signal.SIGTERM)
    assert code in (75, 0)
    if code == 75:
        assert final(run)["reason"] == "stopped"
        assert attempt(run) == 0
    assert attempt(whole) == 0
    assert state_hashes(run) == state_hashes(whole)


def committed(run: RunDirectory) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in run.committed_checkpoints()]


def test_the_plan_fingerprint_ignores_only_what_cannot_change_the_weights(text: Path) -> None:
    from memconsole.plan import catalog
    from memconsole_trainer.loop.fingerprint import fingerprint

    base = plan(text)
    architecture = catalog.architecture(base)
    same = {"train.log_every": 7, "train.keep_checkpoints": 5, "train.evaluate_every": 2}
    other = {"train.seed": 1, "train.batch_size": 5, "optimize.optimizer": "lion", "backend": "jax"}
    assert fingerprint(replace(base, same), architecture) == fingerprint(base, architecture)
    for key, value in other.items():
        assert fingerprint(replace(base, {key: value}), architecture) != fingerprint(
            base, architecture
        )
    wider = msgspec.structs.replace(architecture, hidden_size=512)
    assert fingerprint(base, wider) != fingerprint(base, architecture)


def test_a_directory_with_weights_is_where_training_starts(text: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from memconsole_trainer.weights.loaded_checkpoint import LoadedCheckpoint

    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    train(["words"], 300).save(tmp_path / "model" / "tokenizer.json")
    run = create_run(
        plan(
            text,
            model__name=str(tmp_path / "model"),
            model__target_params=None,
            train__learning_rate=1e-9,
            train__max_steps=1,
        )
    )
    assert attempt(run) == 0
    trained = LoadedCheckpoint(run.committed_checkpoints()[-1])
    ours = trained.tensor("model.layers.1.attention.key.weight")
    theirs = model.model.layers[1].self_attn.k_proj.weight.detach().numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-8)
