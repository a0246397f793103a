"""The regression transformer in the JAX engine: what it computes, that it learns, and its step in two halves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memconsole.memory.exact.timeline import TracerQuestion
from memconsole.plan import catalog
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan, replace
from memconsole.plan.plan_file import dumps
from memconsole_jax import engine, tasks
from memconsole_jax.compiled import compile_cache, offload
from memconsole_jax.compiled.programs import Programs
from memconsole_jax.compiled.step import mean_gradients
from memconsole_jax.engine import JaxEngine
from memconsole_jax.models.layers import product
from memconsole_jax.tracing import trace, trace_targets
from memconsole_trainer.engine import Batch, Part
from memconsole_trainer.host import mapped
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import jax_comparison as comparison
from tests.training.harness.step_memory import step_memory
from tests.unit.window_file import window_file

LENGTH, ROWS, STEPS = 8, 4, 400
MODEL = Regressor(
    features=3,
    outputs=2,
    hidden_size=16,
    layers=3,
    heads=2,
    intermediate_size=24,
    max_positions=9,
)
PARTS: tuple[Part, ...] = ("weights", "optimizer", "gradients")


def plan_with(**settings: Any) -> Plan:
    return replace(
        Plan(),
        {
            "backend": "jax",
            "model.name": "lqr",
            "data.source": "windows.h5",
            "device.name": "cpu",
            "data.sequence_length": LENGTH,
            "train.batch_size": ROWS,
            "train.warmup_steps": 2,
            "train.learning_rate": 1e-2,
            **{key.replace("__", "."): value for key, value in settings.items()},
        },
    )


@pytest.fixture(autouse=True, scope="module")
def no_shared_cache() -> Iterator[None]:
    """Compile here, whatever an earlier run of the tests left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_cache, "enable_compile_cache", lambda: None)
        yield


def built(plan: Plan) -> JaxEngine:
    new = engine.create(plan, None)
    new.build(plan, MODEL, STEPS, InitialWeights(MODEL, 0))
    return new


def batch(micro_batches: int = 1, rows: int = ROWS, seed: int = 0, masked: float = 0.3) -> Batch:
    """Windows whose targets are a linear map of their last step; a share `masked` of them does not count."""
    random = np.random.default_rng(seed)
    windows = random.normal(size=(micro_batches, rows, LENGTH, MODEL.features))
    linear = np.random.default_rng(99).normal(size=(MODEL.features, MODEL.outputs))
    mask = random.random((micro_batches, rows, MODEL.outputs)) >= masked
    arrays = {"windows": windows, "targets": windows[:, :, -1] @ linear, "mask": mask}
    found = {name: array.astype(np.float32) for name, array in arrays.items()}
    return Batch(found, float(mask.sum()))


def test_xla_computes_on_the_pages_of_a_batch_without_a_copy_in_the_heap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy would cut the block that a step frees, and the next step would take another one."""
    pages, empty = list[int](), mapped.empty

    def told(*arguments: Any) -> Any:
        found = empty(*arguments)
        pages.append(found.ctypes.data)
        return found

    trainer = built(plan_with())
    monkeypatch.setattr(mapped, "empty", told)
    arrays = trainer._put_training_batch(batch())
    assert [a.unsafe_buffer_pointer() for a in arrays.values()] == pages
    for name, array in batch().arrays.items():
        np.testing.assert_array_equal(arrays[name], array)


class Checkpoint:
    """A `StateSource` in memory."""

    def __init__(self, source: JaxEngine) -> None:
        self.tensors = {name: np.array(tensor) for name, tensor in source.state()}

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> Any:
        return self.tensors[name]


def assert_same(found: JaxEngine, expected: Checkpoint, tolerance: float = 0.0) -> None:
    tensors = Checkpoint(found).tensors
    assert list(tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        wide = (np.asarray(x, np.float64) for x in (tensors[name], tensor))
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance, err_msg=name)


class Random:
    """A `WeightSource` of float32 weights, random in every tensor, norms and biases included."""

    def __init__(self, seed: int = 3) -> None:
        random = np.random.default_rng(seed)
        self.tensors = {
            p.name: (p.fill + random.normal(size=p.shape) * 0.3).astype(np.float32)
            for p in MODEL.parameters()
        }

    def tensor(self, name: str) -> Any:
        return self.tensors[name]


def reference(w: dict[str, Any], windows: Any) -> Any:
    """The model written out in NumPy, float64: outputs (B, outputs) of windows (B, T, features)."""

    def norm(x: Any, name: str) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    t, size = windows.shape[1], MODEL.head_size
    x = linear(windows.astype(np.float64), "input") + w["positions.weight"][:t]
    for layer in range(MODEL.layers):
        at, mixed = f"layers.{layer}", np.zeros_like(x)
        q, k, v = (x @ w[f"{at}.attention.{n}.weight"].T for n in ("query", "key", "value"))
        for head in range(MODEL.heads):
            own = slice(head * size, (head + 1) * size)
            scores = q[..., own] @ k[..., own].transpose(0, 2, 1) / np.sqrt(size)
            scores[:, np.triu(np.ones((t, t), bool), 1)] = -np.inf
            share = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[..., own] = share / share.sum(-1, keepdims=True) @ v[..., own]
        mixed = mixed @ w[f"{at}.attention.output.weight"].T
        x = norm(x + mixed, f"{at}.attention_norm")
        up = linear(x, f"{at}.mlp.up")
        gelu = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = norm(x + linear(gelu, f"{at}.mlp.down"), f"{at}.mlp_norm")
    return linear(x[:, -1], "head")


def reference_loss(w: dict[str, Any], rows: Batch) -> float:
    """The masked mean squared error of all rows of a batch."""
    windows, targets, mask = (
        rows[n].reshape(-1, *rows[n].shape[2:]) for n in ("windows", "targets", "mask")
    )
    return float((mask * (reference(w, windows) - targets) ** 2).sum() / mask.sum())


def test_the_catalogs_model_has_the_parameters_it_says() -> None:
    plan = plan_with()
    model = catalog.model(plan)
    new = engine.create(plan, None)
    new.build(plan, model, STEPS, InitialWeights(model, 0))
    assert new.parameters == new.trainable_parameters == 208_774
    names = [p.name for p in model.parameters()]
    stored = {name: x.shape for name, x in new.state() if name.startswith("model.")}
    assert stored == {f"model.{p.name}": p.shape for p in model.parameters()}
    assert len(stored) == len(names)


def test_outputs_are_those_of_the_model_written_out_in_float64() -> None:
    weights, rows = Random(), batch()
    found = comparison.outputs(MODEL, weights, dict(next(rows.micro_batches())))
    wide = {name: x.astype(np.float64) for name, x in weights.tensors.items()}
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference(wide, rows["windows"][0]), rtol=1e-4, atol=1e-5)


def test_gradients_are_the_slopes_of_the_loss_written_out_in_float64() -> None:
    """Along a random direction of each weight, by central differences."""
    weights, rows = Random(), batch(micro_batches=2)
    found = comparison.gradients(MODEL, weights, rows)
    wide = {name: x.astype(np.float64) for name, x in weights.tensors.items()}
    random = np.random.default_rng(5)
    assert found.keys() == wide.keys()
    for name, weight in wide.items():
        direction = random.normal(size=weight.shape)
        ends = [
            reference_loss(wide | {name: weight + sign * 1e-5 * direction}, rows)
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / 2e-5
        product = float((found[name] * direction).sum())
        assert product == pytest.approx(slope, rel=1e-3, abs=1e-4), name


def test_weights_below_a_frozen_body_get_the_gradients_they_would_have() -> None:
    task, plan, rows = tasks.of(plan_with(), MODEL), plan_with(), batch(micro_batches=2)
    source = InitialWeights(MODEL, 1)
    programs = Programs.of(plan, MODEL, "cpu", jax.devices()[0])
    arrays = {n: jax.numpy.asarray(s.gather(source.tensor)) for n, s in programs.trained.items()}
    body = {n: x for n, x in arrays.items() if n.startswith("layers.")}
    around = {n: x for n, x in arrays.items() if n not in body}
    loss, own = task.loss(plan, MODEL), dict(rows.arrays)
    run = jax.jit(lambda *weights: mean_gradients(task, loss, *weights, own))
    total, expected = run(arrays, {})
    found_total, found = run(around, body)
    assert found.keys() == around.keys()
    assert float(found_total) == pytest.approx(float(total), rel=1e-6)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
        assert np.abs(gradient).max() > 0


def test_accumulating_ragged_micro_batches_equals_one_large_batch() -> None:
    weights, three = Random(), batch(micro_batches=3)
    three["mask"][1, 1:] = 0
    joined = {n: x.reshape(1, 3 * ROWS, *x.shape[2:]) for n, x in three.arrays.items()}
    weight = float(three["mask"].sum())
    found = comparison.gradients(MODEL, weights, Batch(three.arrays, weight))
    expected = comparison.gradients(MODEL, weights, Batch(joined, weight))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def plain() -> JaxEngine:
    return built(plan_with())


@pytest.fixture(scope="module")
def start(plain: JaxEngine) -> Checkpoint:
    return Checkpoint(plain)


def test_it_learns_a_linear_map_of_the_last_step(plain: JaxEngine, start: Checkpoint) -> None:
    plain.load_state(start)
    held_out = [batch(seed=1000 + i) for i in range(8)]
    before = plain.evaluate(held_out).mean
    for step in range(STEPS):
        plain.train_step(batch(seed=step))
    found = plain.evaluate(held_out)
    zero = sum(float((b["mask"] * b["targets"] ** 2).sum()) for b in held_out) / found.weight
    assert found.mean < 0.2 * min(zero, before)


def test_an_evaluation_sums_squares_and_absolute_errors_of_what_counts(
    plain: JaxEngine, start: Checkpoint
) -> None:
    plain.load_state(start)
    parts = [batch(), batch(micro_batches=2, seed=1), batch(rows=1, seed=2)]
    found = plain.evaluate(parts)
    source = InitialWeights(MODEL, 0)
    weights = {p.name: source.tensor(p.name).astype(np.float64) for p in MODEL.parameters()}
    squares, absolutes = np.zeros(MODEL.outputs), np.zeros(MODEL.outputs)
    for part in parts:
        for rows in part.micro_batches():
            missed = reference(weights, rows["windows"]) - rows["targets"]
            squares += (rows["mask"] * missed**2).sum(0)
            absolutes += (rows["mask"] * abs(missed)).sum(0)
    assert found.weight == sum(part.weight for part in parts)
    assert found.loss == pytest.approx(squares.sum(), rel=1e-5)
    assert found.measures == pytest.approx((*squares, *absolutes), rel=1e-5)


def test_rows_that_only_fill_up_a_batch_count_nothing(plain: JaxEngine, start: Checkpoint) -> None:
    plain.load_state(start)
    source, few = InitialWeights(MODEL, 0), batch(rows=1)
    plain.take_metrics()
    plain.train_step(few)
    weights = {p.name: source.tensor(p.name).astype(np.float64) for p in MODEL.parameters()}
    expected = reference_loss(weights, few)
    assert plain.take_metrics()[0].loss == pytest.approx(expected, rel=1e-5)


def test_resuming_continues_bit_for_bit(plain: JaxEngine, start: Checkpoint) -> None:
    plain.load_state(start)
    plain.train_step(batch(seed=5))
    plain.take_metrics()
    middle, ends = Checkpoint(plain), []
    for _ in range(2):
        plain.load_state(middle)
        for step in range(3):
            plain.train_step(batch(seed=step))
        ends.append((plain.take_metrics(), Checkpoint(plain)))
    assert ends[0][0] == ends[1][0]
    assert [m.step for m in ends[0][0]] == [2, 3, 4]
    assert_same(plain, ends[0][1])


KEPT_NUMBERS: list[dict[str, Any]] = [
    {"optimize__gradient_checkpointing": "selective"},
    {"optimize__gradient_checkpointing": "attention", "train__ema_decay": 0.9},
    {"optimize__gradient_checkpointing": "full", "optimize__optimizer_offload": "pinned"},
    {"optimize__gradient_checkpointing": "full", "optimize__activation_offload": True},
]
OTHER_NUMBERS: list[dict[str, Any]] = [
    {"optimize__precision": "bf16", "optimize__optimizer": "muon"},
    {
        "optimize__precision": "bf16-sr",
        "optimize__optimizer": "lion",
        "train__learning_rate": 3e-3,
    },
    {"optimize__precision": "fp16", "optimize__optimizer": "adamw-8bit"},
    {"optimize__precision": "bf16", "optimize__optimizer": "adafactor"},
    {"optimize__optimizer": "adamw8-all"},
    {"optimize__optimizer": "sgd", "train__learning_rate": 3e-2},
    {"optimize__optimizer_offload": "compressed"},
]


def losses(changes: dict[str, Any], steps: int) -> list[float]:
    found = built(plan_with(**changes))
    for step in range(steps):
        found.train_step(batch(seed=step % 2))
    return [m.loss for m in found.take_metrics()]


@pytest.fixture(scope="module")
def expected(plain: JaxEngine, start: Checkpoint) -> list[float]:
    plain.load_state(start)
    for step in range(4):
        plain.train_step(batch(seed=step % 2))
    return [m.loss for m in plain.take_metrics()]


@pytest.mark.parametrize("changes", KEPT_NUMBERS, ids=lambda c: " ".join(map(str, c.values())))
def test_what_only_saves_memory_changes_no_loss(
    changes: dict[str, Any], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer's state really moves, between two parts of the same memory."""
    monkeypatch.setattr(offload, "same_memory", lambda kind: False)
    assert losses(changes, 4) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("changes", OTHER_NUMBERS, ids=lambda c: " ".join(map(str, c.values())))
def test_every_precision_and_optimizer_learns_two_batches(changes: dict[str, Any]) -> None:
    found = losses(changes, 40)
    assert sum(found[-2:]) < 0.5 * sum(found[:2])


def test_plain_training_compiles_no_half_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Programs, "lower_backward", refused)
    monkeypatch.setattr(Programs, "lower_update", refused)
    found = built(plan_with())
    found.train_step(batch())
    found.evaluate([batch()])
    with pytest.raises(AssertionError):
        found.backward(batch())


HALVES: list[dict[str, Any]] = [
    {"optimize__accumulation_steps": 3, "train__ema_decay": 0.9},
    {"optimize__precision": "fp16", "optimize__optimizer": "adamw-8bit"},
    {"optimize__optimizer_offload": "pinned"},
]


@pytest.mark.parametrize("changes", HALVES, ids=lambda c: " ".join(map(str, c.values())))
def test_backward_and_update_are_a_step_and_parts_come_back_bit_for_bit(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "same_memory", lambda kind: False)
    plan = plan_with(**changes)
    found, many = built(plan), plan.optimize.accumulation_steps
    start = Checkpoint(found)
    for step in range(3):
        found.train_step(batch(many, seed=step))
    whole, expected = Checkpoint(found), found.take_metrics()
    found.load_state(start)
    for step in range(3):
        found.backward(batch(many, seed=99))  # replaced by the next
        found.backward(batch(many, seed=step))
        before = Checkpoint(found)
        for part in PARTS:
            found.release(part)
            assert_same(found, before)
            found.restore(part)
            assert_same(found, before)
        found.update()
    assert_same(found, whole, 1e-5)
    for one, other in zip(found.take_metrics(), expected, strict=True):
        assert one.step == other.step
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-5, nan_ok=True)
        assert (one.learning_rate, one.loss_scale) == (other.learning_rate, other.loss_scale)


def test_what_is_released_leaves_the_device_and_is_missed_by_name(
    plain: JaxEngine, start: Checkpoint
) -> None:
    plain.load_state(start)
    plain.backward(batch())
    size = sum(x.nbytes for x in plain._train_state.weights.values())
    needed = {"weights": size, "optimizer": 2 * size, "gradients": size}
    for part in PARTS:
        plain.synchronize()
        before = sum(x.nbytes for x in jax.live_arrays())
        plain.release(part)
        plain.release(part)
        freed = before - sum(x.nbytes for x in jax.live_arrays())
        assert needed[part] <= freed <= needed[part] + 64
        with pytest.raises(RuntimeError, match=part):
            plain.update()
        plain.restore(part)
        plain.restore(part)
        assert sum(x.nbytes for x in jax.live_arrays()) == before
    plain.release("optimizer")
    plain.backward(batch())
    assert plain.evaluate([batch()]).weight > 0
    with pytest.raises(RuntimeError, match="optimizer"):
        plain.train_step(batch())
    plain.load_state(start)
    assert_same(plain, start)
    with pytest.raises(RuntimeError, match="backward"):
        plain.update()  # gradients of other weights are gone


def test_the_tracer_asks_xla_about_windows(tmp_path: Path) -> None:
    windows = window_file(tmp_path / "windows.h5")
    plan = plan_with(
        data__source=str(windows),
        data__sequence_length=32,
        train__batch_size=16,
        optimize__accumulation_steps=2,
    )
    answer = trace.answer(TracerQuestion(id=1, plan=dumps(plan), kind="cpu"), lambda: None)
    assert answer.exact is not None, answer.problem
    model = catalog.model(plan)
    exact = trace.planned(plan, model, trace_targets.target("", "cpu"))
    assert answer.exact.phases == exact.phases
    new = engine.create(plan, None)
    new.build(plan, model, STEPS, InitialWeights(model, 0))
    own = step_memory(new)
    needed = own.argument_size_in_bytes + own.output_size_in_bytes - own.alias_size_in_bytes
    step = exact.phases[exact.program_phase]
    assert step.total_bytes == needed + own.temp_size_in_bytes
    assert step.components["data"] == 2 * 16 * 4 * (32 * 19 + 6 + 6)
    assert step.components["weights"] == 4 * 208_774


@pytest.mark.parametrize("shape", [(5, 6), (5, 4, 6), (5, 4, 3, 2)])
def test_a_matrix_multiplies_rows_of_any_number_of_axes(shape: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    x, weight, bias = (draw.normal(size=s).astype(np.float32) for s in (shape, (7, 6), (7,)))
    rows = x.reshape(*shape[:2], -1) if len(shape) > 2 else x
    expected, slopes = rows @ weight.T + bias, draw.normal(size=(*rows.shape[:-1], 7))
    found, back = jax.vjp(product, x, weight, bias)
    assert np.allclose(found, expected, atol=1e-5)
    of_x, of_weight, of_bias = back(jnp.asarray(slopes, jnp.float32))
    flat = slopes.reshape(-1, 7)
    assert np.allclose(of_x, (slopes @ weight).reshape(shape), atol=1e-5)
    assert np.allclose(of_weight, flat.T @ rows.reshape(-1, 6), atol=1e-5)
    assert np.allclose(of_bias, flat.sum(0), atol=1e-5)
