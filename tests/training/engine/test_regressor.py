"""The regression transformer in both engines: they agree, alone and below frozen blocks.

What torch's step does in parts is here, too; what JAX's does is in `test_regressor_jax.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memconsole.plan.models.model import Model, Parameter
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks import REGRESSION
from memconsole_jax import engine as jax_engine
from memconsole_torch import engine as torch_engine
from memconsole_torch.techniques.optimizer import offload
from memconsole_trainer.engine import Batch, Engine, Part
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import jax_comparison, torch_comparison

torch.set_num_threads(1)

BACKENDS = ("torch", "jax")
LENGTH, ROWS = 8, 4
MODEL = Regressor(
    features=3,
    outputs=2,
    hidden_size=16,
    layers=2,
    heads=2,
    intermediate_size=24,
    max_positions=9,
)
PARTS: tuple[Part, ...] = ("weights", "optimizer", "gradients")
CREATE: dict[str, Callable[[Plan, None], Engine]] = {
    "torch": torch_engine.create,
    "jax": jax_engine.create,
}


def built(backend: str, **settings: Any) -> Engine:
    plan = replace(
        Plan(),
        {
            "backend": backend,
            "model.name": "lqr",
            "data.source": "windows.h5",
            "device.name": "cpu",
            "data.sequence_length": LENGTH,
            "train.batch_size": ROWS,
            "train.warmup_steps": 0,
            "train.learning_rate": 1e-2,
            **{key.replace("__", "."): value for key, value in settings.items()},
        },
    )
    engine = CREATE[backend](plan, None)
    engine.build(plan, MODEL, 100, InitialWeights(MODEL, 0))
    return engine


def batch(micro_batches: int = 1, rows: int = ROWS, seed: int = 0) -> Batch:
    """Random windows; a third of the targets does not count."""
    draw = np.random.default_rng(seed)
    mask = draw.random((micro_batches, rows, MODEL.outputs)) > 1 / 3
    arrays = {
        "windows": draw.normal(size=(micro_batches, rows, LENGTH, MODEL.features)),
        "targets": draw.normal(size=mask.shape),
        "mask": mask,
    }
    return Batch({n: a.astype(np.float32) for n, a in arrays.items()}, float(mask.sum()))


def joined(parts: Batch) -> Batch:
    """The same rows in one micro-batch."""
    return Batch({n: a.reshape(1, -1, *a.shape[2:]) for n, a in parts.arrays.items()}, parts.weight)


class Weights:
    """A `WeightSource`: random in every tensor, norms and biases included."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.tensors = {
            p.name: (p.fill + 0.3 * draw.normal(size=p.shape)).astype(np.float32)
            for p in MODEL.parameters()
        }

    def tensor(self, name: str) -> Any:
        return self.tensors[name]


class State:
    """A `StateSource`: a copy of an engine's state."""

    def __init__(self, engine: Engine) -> None:
        self.tensors = {name: np.array(tensor) for name, tensor in engine.state()}

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> Any:
        return self.tensors[name]


def assert_same(engine: Engine, expected: State) -> None:
    found = State(engine).tensors
    assert list(found) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert found[name].tobytes() == tensor.tobytes(), name


def assert_close(found: Any, expected: Any, name: str = "") -> None:
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max()), name


def test_both_backends_give_the_same_outputs_and_gradients() -> None:
    weights, rows = Weights(1), batch(micro_batches=2)
    windows = dict(next(rows.micro_batches()))
    found = torch_comparison.outputs(MODEL, weights, windows)
    assert found.shape == (ROWS, MODEL.outputs)
    assert_close(found, jax_comparison.outputs(MODEL, weights, windows))
    gradients = torch_comparison.gradients(MODEL, weights, rows)
    others = jax_comparison.gradients(MODEL, weights, rows)
    assert gradients.keys() == others.keys() == {p.name for p in MODEL.parameters()}
    for name, gradient in gradients.items():
        assert_close(gradient, others[name], name)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimize__accumulation_steps": 2, "train__ema_decay": 0.9},
        {"optimize__precision": "bf16-sr", "optimize__optimizer": "muon"},
    ],
    ids=lambda s: " ".join(map(str, s.values())) or "plain",
)
def test_both_backends_take_the_same_steps(settings: dict[str, Any]) -> None:
    told = []
    for backend in BACKENDS:
        engine = built(backend, **settings)
        many = settings.get("optimize__accumulation_steps", 1)
        for step in range(6):
            engine.train_step(batch(many, seed=step % 2))
        metrics = engine.take_metrics()
        total = engine.evaluate([batch(seed=9)])
        told.append([m.loss for m in metrics] + [total.mean, *total.measures])
    # Six steps of Muon on weights of 16 bits: what either backend rounds differently grows.
    tolerance = 5e-2 if "optimize__precision" in settings else 1e-3
    assert told[0] == pytest.approx(told[1], rel=tolerance)
    assert told[0][4] < told[0][0]


def test_micro_batches_equal_one_large_batch_and_padding_counts_nothing() -> None:
    """The second micro-batch counts one target; rows of the large batch that only fill it up are far off."""
    parts = batch(micro_batches=2)
    parts["mask"][1] = 0
    parts["mask"][1, 0, 0] = 1
    parts = Batch(parts.arrays, float(parts["mask"].sum()))
    filled = joined(parts)
    more = {n: np.concatenate([a, np.full_like(a, 50.0)], axis=1) for n, a in filled.arrays.items()}
    more["mask"][:, 2 * ROWS :] = 0
    told = []
    for rows, settings in (
        (parts, {"optimize__accumulation_steps": 2}),
        (filled, {"train__batch_size": 2 * ROWS}),
        (Batch(more, parts.weight), {"train__batch_size": 4 * ROWS}),
    ):
        engine = built("torch", optimize__optimizer="sgd", train__beta1=0.0, **settings)
        engine.train_step(rows)
        (metrics,) = engine.take_metrics()
        told.append((metrics, State(engine)))
        assert engine.evaluate([rows]).weight == parts.weight
    for metrics, state in told[1:]:
        assert metrics.loss == pytest.approx(told[0][0].loss, rel=1e-5)
        assert metrics.gradient_norm == pytest.approx(told[0][0].gradient_norm, rel=1e-5)
        for name, tensor in state.tensors.items():
            assert_close(tensor, told[0][1].tensors[name], name)


HALVES: dict[str, dict[str, Any]] = {
    "8-bit and average": {"optimize__optimizer": "adamw-8bit", "train__ema_decay": 0.9},
    "fp16, accumulated": {"optimize__precision": "fp16", "optimize__accumulation_steps": 2},
    "bf16-sr": {"optimize__precision": "bf16-sr"},
    "compressed": {"optimize__optimizer_offload": "compressed"},
}


@pytest.mark.parametrize("case", HALVES)
def test_backward_and_update_are_a_step_and_parts_come_back_bit_for_bit(case: str) -> None:
    engine = built("torch", **HALVES[case])
    many = HALVES[case].get("optimize__accumulation_steps", 1)
    start = State(engine)
    for step in range(3):
        engine.train_step(batch(many, seed=step))
    whole, expected = State(engine), engine.take_metrics()
    engine.load_state(start)
    for step in range(3):
        engine.backward(batch(many, seed=99))  # replaced by the next one
        engine.backward(batch(many, seed=step))
        before = State(engine)
        for part in PARTS:
            engine.release(part)
            assert_same(engine, before)
        for part in PARTS:
            engine.restore(part)
        assert_same(engine, before)
        engine.update()
    assert_same(engine, whole)
    assert str(engine.take_metrics()) == str(expected)  # a norm may be NaN


def test_what_is_released_is_missed_by_name_until_it_is_restored() -> None:
    engine = built("torch", train__ema_decay=0.9)
    start = State(engine)
    with pytest.raises(RuntimeError, match="backward"):
        engine.update()
    engine.backward(batch())
    for part in PARTS:
        engine.release(part)
        engine.release(part)
        with pytest.raises(RuntimeError, match=part):
            engine.update()
        engine.restore(part)
        engine.restore(part)
    engine.release("weights")
    unable: list[Callable[[], Any]] = [
        lambda: engine.train_step(batch()),
        lambda: engine.evaluate([batch()]),
    ]
    for call in unable:
        with pytest.raises(RuntimeError, match="weights"):
            call()
    engine.restore("weights")
    engine.release("optimizer")
    engine.backward(batch())
    engine.release("weights")
    engine.load_state(start)
    assert_same(engine, start)
    with pytest.raises(RuntimeError, match="backward"):
        engine.update()  # the gradients of the weights before are gone
    engine.train_step(batch())
    assert engine.take_metrics()[0].step == 1


def test_torch_frees_the_memory_of_what_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "same_memory", lambda device: False)
    engine = built("torch", train__ema_decay=0.9, optimize__optimizer="adamw-8bit")
    assert isinstance(engine, torch_engine.TorchEngine)
    engine.train_step(batch())
    engine.backward(batch())
    size = sum(p.size for p in MODEL.parameters())
    for part in PARTS:
        tensors = list(engine.saved.of(part))
        before = [t.detach().clone() for t in tensors]
        assert sum(t.numel() for t in tensors) >= (1 if part == "gradients" else 2) * size
        engine.release(part)
        assert not any(t.untyped_storage().nbytes() for t in tensors)
        held = [engine._releaser.values(t) for t in tensors]
        assert all(map(torch.equal, held, before))
        engine.restore(part)
        assert all(map(torch.equal, tensors, before))
    engine.update()


def test_torch_keeps_no_tensor_between_the_batches_of_an_evaluation_on_a_cpu() -> None:
    """A tensor that stayed would cut the memory that a batch frees, and the next one would take more."""
    engine, alive = built("torch"), list[int]()

    def batches() -> Iterator[Batch]:
        for number in range(4):
            alive.append(sum(isinstance(found, torch.Tensor) for found in gc.get_objects()))
            yield batch(seed=number)

    whole = engine.evaluate(batches())
    assert len(set(alive[1:])) == 1
    parts = [engine.evaluate([batch(seed=number)]) for number in range(4)]
    assert whole.loss == sum(part.loss for part in parts)
    assert whole.measures == tuple(map(sum, zip(*(part.measures for part in parts), strict=True)))


def test_the_regressor_continues_no_text() -> None:
    with pytest.raises(ValueError, match="no text"):
        built("torch").generate([1], 1)


@pytest.mark.parametrize("checkpointing", ["full", "attention", "selective"])
def test_checkpointed_blocks_compute_the_same_in_torch(checkpointing: str) -> None:
    engine = built("torch", optimize__gradient_checkpointing=checkpointing)
    engine.train_step(batch())
    (found,) = engine.take_metrics()
    gradients = torch_comparison.gradients(MODEL, InitialWeights(MODEL, 0), batch())
    norm = float(np.sqrt(sum((g**2).sum() for g in gradients.values())))
    assert found.gradient_norm == pytest.approx(norm, rel=1e-5)


def only(*wanted: str) -> Callable[[Any, Plan, Model], list[Parameter]]:
    """A task's `trained` that trains the weights whose names begin so."""
    return lambda self, plan, model: [p for p in model.parameters() if p.name.startswith(wanted)]


FROZEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"optimize__accumulation_steps": 2},
    "8-bit and average": {"optimize__optimizer": "adamw-8bit", "train__ema_decay": 0.9},
    "checkpointed": {"optimize__gradient_checkpointing": "full"},
    "fp16": {"optimize__precision": "fp16"},
    "bf16-sr": {"optimize__precision": "bf16-sr"},
    "muon, compressed": {
        "optimize__optimizer": "muon",
        "optimize__optimizer_offload": "compressed",
    },
}
FROZEN_JAX = ("accumulated", "8-bit and average")


@pytest.mark.parametrize(
    ("backend", "case"), [*(("torch", case) for case in FROZEN), *(("jax", c) for c in FROZEN_JAX)]
)
def test_trained_parts_below_frozen_blocks(
    backend: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only they change, by the gradients that they have when all is trained, and only they have optimizer state."""
    monkeypatch.setattr(type(REGRESSION), "trained", only("input."))
    engine = built(backend, train__grad_clip=0.0, **FROZEN[case])
    rows = batch(FROZEN[case].get("optimize__accumulation_steps", 1))
    assert engine.trainable_parameters == 3 * 16 + 16
    assert engine.parameters == sum(p.size for p in MODEL.parameters())
    before = State(engine).tensors
    engine.train_step(rows)
    (metrics,) = engine.take_metrics()
    expected = torch_comparison.gradients(MODEL, InitialWeights(MODEL, 0), rows)
    own = [g for name, g in expected.items() if name.startswith("input.")]
    norm = float(np.sqrt(sum((g**2).sum() for g in own)))
    assert metrics.gradient_norm == pytest.approx(norm, rel=3e-2 if "16" in case else 1e-4)
    after = State(engine)
    for name, tensor in after.tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            assert np.array_equal(tensor, before[name]) == (not rest.startswith("input.")), name
        else:
            assert not any(p.name in rest for p in MODEL.parameters()) or "input." in rest, name
    engine.release("weights")
    engine.restore("weights")
    engine.train_step(rows)
    engine.load_state(after)
    assert_same(engine, after)


@pytest.mark.parametrize("backend", BACKENDS)
def test_some_weights_of_every_block_may_be_trained(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = tuple(f"layers.{i}.{name}_norm." for i in range(2) for name in ("attention", "mlp"))
    monkeypatch.setattr(type(REGRESSION), "trained", only("head.", *norms))
    engine = built(backend, train__grad_clip=0.0, optimize__accumulation_steps=2)
    before = State(engine).tensors
    engine.train_step(batch(2))
    after = State(engine).tensors
    moved = {
        n for n in before if n.startswith("model.") and not np.array_equal(before[n], after[n])
    }
    assert moved == {
        f"model.{p.name}" for p in MODEL.parameters() if p.name.startswith(("head.", *norms))
    }
