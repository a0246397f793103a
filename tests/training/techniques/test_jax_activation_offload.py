"""On a CPU the JAX backend's block inputs wait on disk: the same training, and of all layers' inputs one in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from memconsole.memory.activations.jax_step import moments
from memconsole.memory.exact.sharpen import KnownExact, sharpened
from memconsole.memory.formula import memory_table
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole.plan.plan_file import dumps
from memconsole.runs.act.environment import trainer_environment
from memconsole.units import MIB
from memconsole_jax import engine as jax_engine
from memconsole_jax.techniques.activations.activation_offload import Disk
from memconsole_jax.tracing import trace, trace_targets
from memconsole_trainer.data.text.rows.batches import language_batch
from tests.accuracy.torch_formula import TRAINING
from tests.training.harness import adapted
from tests.training.harness.activation_offload import EVERYTHING, FULL, KEY, STEPS
from tests.training.harness.adapted import LENGTH, MODELS, State
from tests.training.harness.offloaded import LORA, plan_with
from tests.training.harness.pairs import rows

ISOLATED = {"data.isolate_documents": True}
ACCUMULATED = {"optimize.accumulation_steps": 2, "train.batch_size": 2}
CASES: list[dict[str, Any]] = [
    {},
    {"optimize.precision": "bf16", "optimize.fused_loss": True},
    {"optimize.precision": "fp16"},
    {"optimize.fused_loss": True} | ISOLATED,
    LORA | ACCUMULATED,
    {"train.dropout": 0.2, "train.attention_dropout": 0.2} | ACCUMULATED,
    EVERYTHING | ISOLATED,
]
DEEP = Architecture(
    family="llama", vocab_size=96, hidden_size=64, layers=24, heads=4, kv_heads=4, head_size=16,
    intermediate_size=128, max_positions=128, tied_embeddings=True,
)  # fmt: skip
DEEP_INPUT = 4 * 64 * 128 * 64
"""Bytes of one block's input, of 64 rows."""
CPU = Budget(
    name="cpu", kind="cpu", memory_label="host RAM", total_bytes=2**34, usable_bytes=2**34, why="test"
)  # fmt: skip
LARGE = {"data.sequence_length": 128, "train.batch_size": 64, "optimize.fused_loss": True}
PROGRAM = """
import json, sys
import msgspec
import numpy as np
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan_file import loads
from memconsole_jax import engine
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.weights.initialize import InitialWeights

plan, a = loads(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Architecture)
made = engine.create(plan, None)
made.build(plan, a, 10, InitialWeights(a, 0))
tokens = np.random.default_rng(0).integers(0, 96, (1, 64, 128)).astype(np.int32)
for step in range(3):
    made.train_step(language_batch(tokens, tokens))
    losses = [m.loss for m in made.take_metrics()]
    if step == 0:  # compiled
        made.reset_peak()
print(json.dumps([made.memory().peak_bytes, losses]))
"""


class Counted:
    """What passes through the disk: bytes of the file behind every move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        for name in ("_put", "_take"):
            monkeypatch.setattr(Disk, name, self._around(getattr(Disk, name)))

    def _around(self, move: Any) -> Any:
        def moved(disk: Any, *arguments: Any) -> None:
            move(disk, *arguments)
            self.sizes.append(os.fstat(disk._file.fileno()).st_size)

        return moved


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    return Counted(monkeypatch)


def built(plan: Plan, directory: Path | None = None) -> Any:
    engine = jax_engine.create(plan, directory)
    engine.build(plan, MODELS["llama"], STEPS, adapted.Base("llama"))
    return engine


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_it_trains_the_same_and_the_file_holds_one_micro_batch(
    changes: dict[str, Any], tmp_path: Path, counted: Counted
) -> None:
    trained = []
    for value in (False, True):
        plan = plan_with("jax", FULL | changes | {KEY: value})
        engine = built(plan, tmp_path)
        for step in range(STEPS):
            engine.train_step(rows(plan, step))
        trained.append((engine, [m.loss for m in engine.take_metrics()]))
        assert value or not counted.sizes
    (plain, expected), (moved, found) = trained
    # Two programs, compiled apart: equal to the bit on one machine at either level of optimization, but XLA may
    # order a sum differently where more threads or another vector width are used. A step's rounding in float32 then
    # passes through Adam, which has moved weights by 3e-6.
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    state = State(plain)
    for name, array in State(moved).tensors.items():
        np.testing.assert_allclose(array, state.tensor(name), rtol=1e-4, atol=1e-5, err_msg=name)
    a = MODELS["llama"]
    one = plan.train.batch_size * LENGTH * a.hidden_size * 4
    written = [one * (layer + 1) for layer in range(a.layers)]
    read = [*([written[-1]] * (a.layers - 1)), 0]
    assert counted.sizes == STEPS * plan.optimize.accumulation_steps * (written + read)
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_evaluation_and_samples_move_nothing(counted: Counted) -> None:
    plan = plan_with("jax", FULL | {KEY: True})
    engine = built(plan)
    batch = rows(plan, 0)
    found = engine.evaluate([language_batch(batch["inputs"], batch["targets"])])
    assert len(engine.generate([1, 2], 4)) == 4
    assert counted.sizes == []
    plain = built(plan_with("jax", FULL))
    assert found == plain.evaluate([language_batch(batch["inputs"], batch["targets"])])


def test_a_resumed_run_continues_the_same() -> None:
    plan = plan_with("jax", FULL | {KEY: True})
    undisturbed, resumed = built(plan), built(plan)
    for step in range(STEPS):
        if step == 2:
            resumed.load_state(State(undisturbed))
        undisturbed.train_step(rows(plan, step))
        if step >= 2:
            resumed.train_step(rows(plan, step))
    assert resumed.take_metrics()[-1].loss == undisturbed.take_metrics()[-1].loss


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_full_or_broken_disk_is_an_error_of_the_step(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    plan = plan_with("jax", FULL | {KEY: True})
    engine = built(plan)
    engine.train_step(rows(plan, 0))
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left") as raised:
        engine.train_step(rows(plan, 1))
    assert raised.value.errno == 28


def test_other_errors_of_the_program_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ValueError("not the disk")

    monkeypatch.setattr(Disk, "_put", broken)
    plan = plan_with("jax", FULL | {KEY: True})
    engine = built(plan)
    with pytest.raises(Exception, match="not the disk") as raised:
        engine.train_step(rows(plan, 0))
    assert not isinstance(raised.value, OSError)


def test_the_exact_tier_compiles_it_without_a_file(counted: Counted) -> None:
    """XLA plans all layers' inputs but one less, as the formula says."""
    place = trace_targets.target("", "cpu")
    exact, formula = [], []
    for value in (False, True):
        plan = plan_with("jax", FULL | LARGE | {KEY: value})
        exact.append(trace.planned(plan, DEEP, place).phases[trace.STEP].total_bytes)
        step = step_of(plan, DEEP, "cpu")
        formula.append(max(m.total for m in moments(step) if m.phase in TRAINING))
    assert counted.sizes == []
    saved = (DEEP.layers - 1) * DEEP_INPUT
    assert exact[0] - exact[1] == pytest.approx(saved, rel=0.2)
    assert formula[0] - formula[1] == saved


def test_the_process_has_one_blocks_input_of_all_layers() -> None:
    """Two processes with the environment of a run, measured beside the console's exact number. The formula's number is
    compared with the exact one elsewhere (`python tests/accuracy/xla.py`)."""
    place = trace_targets.target("", "cpu")
    peaks, losses = [], []
    for value in (False, True):
        plan = plan_with("jax", FULL | LARGE | {KEY: value})
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, dumps(plan), msgspec.json.encode(DEEP).decode()],
            env=trainer_environment(plan, os.environ),
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        peak, loss = json.loads(done.stdout.splitlines()[-1])
        peaks.append(peak)
        losses.append(loss)
        known = KnownExact(exact=trace.planned(plan, DEEP, place))
        estimate = sharpened(memory_table(plan, DEEP, CPU), known).peak_bytes
        assert peak == pytest.approx(estimate, rel=0.1)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    assert peaks[0] - peaks[1] == pytest.approx((DEEP.layers - 1) * DEEP_INPUT, rel=0.15)
    assert peaks[0] - peaks[1] > 40 * MIB
