"""Snapshots, jumps, rollback and the phases' memory, on the engines of both backends."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
import pytest

from memconsole_trainer.control import confirm
from memconsole_trainer.control.halves import halves
from memconsole_trainer.control.hybrid import Hybrid
from memconsole_trainer.engine import Array, ReleaseMode
from memconsole_trainer.jumps import PREFIX, JumpingEngine, Path, shrunk_sum
from memconsole_trainer.techniques import average, blockwise
from tests.training.engine.test_regressor import batch, built
from tests.training.harness import reference
from tests.training.harness.adapted import State

BACKENDS = ("torch", "jax")
SETTINGS: dict[str, Any] = {
    "hybrid__mode": "aggressive",
    "hybrid__warmup_steps": 2,
    "hybrid__full_steps": 5,
    "hybrid__correct_steps": 2,
    "hybrid__snapshot_stride": 1,
    "hybrid__horizon": 4,
    "hybrid__confidence": 0.0,
    "hybrid__predictor": "extrapolate",
    "hybrid__predict_precision": "same",
}
STEPS = 16


@pytest.fixture(autouse=True)
def _easily_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any fall of the loss confirms a jump, so that a few steps pass through every phase."""
    monkeypatch.setattr(confirm, "QUANTILES", (0.0,) * 7)


PAIRS = ((0, 1), (1, 2))


def engine_of(backend: str, **settings: Any) -> JumpingEngine:
    pytest.importorskip(backend)
    return cast(JumpingEngine, built(backend, **{**SETTINGS, **settings}))


@cache
def moved(backend: str) -> JumpingEngine:
    """An engine with three snapshots; tests leave its weights as they are."""
    engine = engine_of(backend)
    for seed in range(3):
        engine.jumps.snapshot()
        engine.train_step(batch(seed=seed))
    return engine


def tensors(engine: JumpingEngine, prefix: str) -> dict[str, Array]:
    found = State(engine).tensors.items()
    return {n.removeprefix(prefix): np.asarray(x) for n, x in found if n.startswith(prefix)}


def path_of(engine: JumpingEngine, shares: tuple[float, ...]) -> Path:
    groups = engine.jumps.products(PAIRS)
    return Path(PAIRS, {group: np.array(shares) for group in groups})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_snapshot_is_the_weights_as_bf16_and_their_difference_from_it(backend: str) -> None:
    engine = engine_of(backend)
    first = tensors(engine, "model.")
    engine.jumps.snapshot()
    engine.train_step(batch())
    engine.jumps.snapshot()
    then = tensors(engine, "model.")
    bf16 = tensors(engine, f"{PREFIX}anchor.")[next(iter(first))].dtype
    for name, weight in first.items():
        anchor = weight.astype(bf16)
        assert np.array_equal(tensors(engine, f"{PREFIX}anchor.")[name], anchor)
        for number, now in enumerate((weight, then[name])):
            stored = tensors(engine, f"{PREFIX}{number}.")[name]
            assert np.array_equal(stored, (now - anchor.astype(np.float32)).astype(bf16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_are_those_of_the_movements_in_float64(backend: str) -> None:
    engine = moved(backend)
    snapshots = [tensors(engine, f"{PREFIX}{number}.") for number in range(3)]
    found = engine.jumps.products(PAIRS)
    for group, products in found.items():
        own = [n for n in snapshots[0] if group in (n, ".".join(_without_layer(n)))]
        rows = [
            np.concatenate(
                [
                    (snapshots[b][n].astype(float) - snapshots[a][n].astype(float)).ravel()
                    for n in own
                ]
            )
            for a, b in PAIRS
        ]
        expected = np.array([[x @ y for y in rows] for x in rows])
        assert np.allclose(products, expected, rtol=1e-4, atol=1e-9)


def _without_layer(name: str) -> list[str]:
    return [word for word in name.split(".") if not word.isdecimal()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_jump_that_is_not_kept_leaves_every_bit_and_one_that_is_can_be_undone(
    backend: str,
) -> None:
    engine = moved(backend)
    before = tensors(engine, "model.")
    first, second = halves(batch(rows=4))
    engine.jumps.begin(path_of(engine, (1.0, 2.0)))
    losses = [engine.jumps.loss(first, scale) for scale in (0.0, 1.0, 0.0)]
    groups = engine.jumps.losses(second, 1.0)
    assert groups.shape == (2,)
    assert groups.sum() == pytest.approx(engine.jumps.loss(second, 1.0), rel=1e-5)
    engine.jumps.end(0.0)
    assert losses[0] == losses[2] != losses[1]
    assert same(tensors(engine, "model."), before)

    snapshots = [tensors(engine, f"{PREFIX}{number}.") for number in range(3)]
    engine.jumps.begin(path_of(engine, (1.0, 2.0)))
    expected = engine.jumps.loss(first, 0.5)
    engine.jumps.end(0.5)
    after = tensors(engine, "model.")
    for name, weight in before.items():
        a, b, c = (snapshot[name].astype(np.float32).ravel() for snapshot in snapshots)
        expected_move = 0.5 * shrunk_sum(np.stack([b - a, c - b]), np.array([1.0, 2.0]))
        moved_by = (after[name] - weight).ravel()
        assert np.allclose(moved_by, expected_move, rtol=1e-2, atol=1e-6)
    engine.jumps.begin(path_of(engine, (1.0, 2.0)))
    assert engine.jumps.loss(first, 0.0) == pytest.approx(expected, rel=1e-5)
    engine.jumps.end(0.0)
    engine.jumps.undo()
    assert same(tensors(engine, "model."), before)


def test_a_jump_in_bf16_changes_no_bit_of_the_weights_it_leaves() -> None:
    for backend in BACKENDS:
        engine = engine_of(backend, hybrid__predict_precision="bf16")
        for seed in range(3):
            engine.jumps.snapshot()
            engine.train_step(batch(seed=seed))
        before = tensors(engine, "model.")
        engine.jumps.begin(path_of(engine, (1.0, 2.0)))
        first, _ = halves(batch(rows=4))
        narrow = engine.jumps.loss(first, 0.0)
        engine.jumps.end(0.0)
        assert same(tensors(engine, "model."), before)
        engine = moved(backend)
        engine.jumps.begin(path_of(engine, (1.0, 2.0)))
        wide = engine.jumps.loss(first, 0.0)
        engine.jumps.end(0.0)
        assert narrow != wide
        assert narrow == pytest.approx(wide, rel=0.02)


def test_weights_wait_on_the_host_while_bf16_copies_are_tried() -> None:
    """As on a GPU: the host stands for the device here."""
    torch = pytest.importorskip("torch")
    engine: Any = engine_of("torch", hybrid__predict_precision="bf16")
    for seed in range(3):
        engine.jumps.snapshot()
        engine.train_step(batch(seed=seed))
    rows, path = batch(seed=9), path_of(engine, (0.5, 0.5))
    losses = []
    for moves in (False, True):
        engine.jumps._releaser._moves = moves
        before = [p.detach().clone() for p in engine.module.parameters()]
        engine.jumps.begin(path)
        sizes = {p.untyped_storage().nbytes() for p in engine.module.parameters() if p.dim() > 1}
        assert (sizes == {0}) == moves
        losses.append([engine.jumps.loss(rows, scale) for scale in (0.0, 1.0)])
        engine.jumps.end(0.0)
        assert all(map(torch.equal, before, engine.module.parameters()))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["cpu", "pinned", "compress", "reinitialize"])
def test_optimizer_state_comes_back_as_its_strategy_promises(
    backend: str, mode: ReleaseMode
) -> None:
    engine = moved(backend)
    stored = State(engine)
    before = tensors(engine, "optimizer.")
    engine.release("optimizer", mode)
    away = tensors(engine, "optimizer.")
    with pytest.raises(RuntimeError, match="released"):
        engine.update()
    engine.release("optimizer", mode)
    engine.fetch("optimizer")
    engine.restore("optimizer")
    back = tensors(engine, "optimizer.")
    for name, old in before.items():
        if name.endswith(("step", "count")):
            continue
        assert np.array_equal(back[name], away[name]), "a checkpoint meanwhile holds the same"
        if mode in ("cpu", "pinned"):
            assert np.array_equal(back[name], old)
        elif mode == "reinitialize":
            assert not back[name].any()
        else:
            signed = not ("nu" in name.split(".") or name.endswith("exp_avg_sq"))
            assert np.array_equal(back[name].ravel(), coded(old.ravel(), signed))
            engine.release("optimizer", "compress")  # a second time changes nothing more
            assert np.array_equal(tensors(engine, "optimizer.")[name], back[name])
    engine.load_state(stored)
    assert same(tensors(engine, ""), stored.tensors)


def test_state_that_waits_elsewhere_is_reinitialized_too() -> None:
    torch = pytest.importorskip("torch")
    from memconsole_torch.releasing import Releaser

    state = torch.full((3,), torch.nan)  # on a device that is not the engine's
    releaser = Releaser(torch.device("meta"), lambda part: [state], moves=True)
    releaser.release("optimizer", "reinitialize")
    releaser.restore("optimizer")
    assert state.tolist() == [0.0] * 3


def coded(array: Array, signed: bool) -> Array:
    """`array` after 8 bits, block by block, each with the sign of its largest element turned to
    plus."""
    found = []
    for start in range(0, array.size, blockwise.BLOCK):
        block = array[start : start + blockwise.BLOCK].astype(np.float32)
        sign = -1 if block[np.abs(block).argmax()] < 0 else 1
        codes, scales = reference.quantize(sign * block, signed=signed)
        found.append(sign * reference.dequantize(codes, scales, signed=signed))
    return np.concatenate(found)


def same(found: dict[str, Array], expected: dict[str, Array]) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("memory", ["none", "compress", "reinitialize"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_goes_on_bit_for_bit_from_a_state_in_any_phase(backend: str, memory: str) -> None:
    settings = {"hybrid__memory": memory, "hybrid__predictor": "nowcast"}
    engine = engine_of(backend, **settings)
    control = Hybrid(engine_plan(engine), STEPS)
    control.prepare(engine)
    kept = {}
    for step in range(STEPS):
        if control.phase not in kept:
            kept[control.phase] = step, State(engine), control.state()
        take(control, engine, step)
    end, decisions = State(engine).tensors, control.state()
    wanted = {"warmup", "full", "predict", "correct"} | ({"restore"} if memory != "none" else set())
    assert wanted <= set(kept)
    for step, state, decided in kept.values():
        engine.load_state(state)
        control = Hybrid(engine_plan(engine), STEPS)
        control.load_state(decided)
        control.prepare(engine)
        for following in range(step, STEPS):
            take(control, engine, following)
        assert same(State(engine).tensors, end)
        assert control.state() == decisions


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_phase_computes_gradients_in_its_own_precision(backend: str) -> None:
    own = {"warmup": "bf16", "full": "same", "correct": "bf16"}
    engine = engine_of(backend, **{f"hybrid__{phase}_precision": p for phase, p in own.items()})
    alone = {
        "same": engine_of(backend),
        "bf16": engine_of(backend, optimize__precision="bf16"),
    }
    control, seen = Hybrid(engine_plan(engine), STEPS), set()
    control.prepare(engine)
    for step in range(STEPS):
        phase, losses = control.phase, {}
        if phase in own and phase not in seen:
            state = State(engine)
            for precision, other in alone.items():
                other.load_state(state)
                other.train_step(batch(seed=step))
                losses[precision] = other.take_metrics()[-1].loss
        control.step(engine, batch(seed=step))
        loss = control.take_metrics(engine)[-1].loss
        if losses:
            seen.add(phase)
            assert losses["same"] != losses["bf16"]
            assert loss == losses[own[phase]]
        control.prepare(engine)
    assert seen == set(own)


def engine_plan(engine: Any) -> Any:
    return engine._plan


def take(control: Hybrid, engine: JumpingEngine, step: int) -> None:
    control.step(engine, batch(seed=step))
    control.take_metrics(engine)
    control.prepare(engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_is_not_finite_undoes_the_latest_jumps(backend: str) -> None:
    engine = engine_of(backend, train__ema_decay=0.9)
    control = Hybrid(engine_plan(engine), 100)
    control.prepare(engine)
    before = tensors(engine, "model.")
    for step in range(60):
        before = before if control.state()["can_undo"] else tensors(engine, "model.")
        take(control, engine, step)
        if control.state()["can_undo"] and control.phase == "correct":
            break
    spoiled = batch(seed=99)
    spoiled.arrays["windows"][...] = np.inf
    control.take_events()
    control.step(engine, spoiled)
    assert control.take_metrics(engine)[-1].undone
    (told,) = control.take_events()
    assert "the latest jumps are undone" in told.message
    assert same(tensors(engine, "model."), before)
    assert same(tensors(engine, average.PREFIX), before), "the average begins again"
    assert control.phase == "full"
    assert all(np.isfinite(x).all() for x in tensors(engine, "optimizer.").values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_summed_micro_batches_report_the_mean_loss_and_move_by_a_share_of_the_rate(
    backend: str,
) -> None:
    """With SGD, a sum of N means at rate / N is the mean at the rate."""
    common = {
        "optimize__optimizer": "sgd", "optimize__accumulation_steps": 2, "train__grad_clip": 0.0,
        "train__batch_size": 2, "train__weight_decay": 0.0,
    }  # fmt: skip
    mean, summed = (
        engine_of(backend, hybrid__accumulation=how, **common)
        for how in ("normalize", "scale-rate")
    )
    for engine in (mean, summed):
        engine.train_step(batch(micro_batches=2, rows=2))
    (a,), (b,) = mean.take_metrics(), summed.take_metrics()
    assert a.loss == pytest.approx(b.loss, rel=1e-5)
    assert b.learning_rate == a.learning_rate / 2
    assert b.gradient_norm == pytest.approx(2 * a.gradient_norm, rel=1e-5)
    for x, y in zip(
        tensors(mean, "model.").values(), tensors(summed, "model.").values(), strict=True
    ):
        assert np.allclose(x, y, atol=1e-6)


def test_halves_hold_every_row_once() -> None:
    whole = batch(micro_batches=1, rows=5)
    first, second = halves(whole)
    joined = np.concatenate([second["windows"], first["windows"]], axis=1)
    assert np.array_equal(joined, whole["windows"])
    assert first["windows"].shape[1] == 3
    assert first.weight + second.weight == pytest.approx(whole.weight)
    accumulated = batch(micro_batches=3, rows=2)
    first, second = halves(accumulated)
    assert (first["windows"].shape[0], second["windows"].shape[0]) == (2, 1)
