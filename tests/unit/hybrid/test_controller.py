"""The controller of hybrid training on a scripted engine, and what the loop does between its phases."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest

from memconsole.plan.plan import Plan, replace
from memconsole_trainer.control.hybrid import LEAST_PAIRS, TRIM_EVERY, Hybrid
from memconsole_trainer.control.monitor import LEAST
from memconsole_trainer.engine import Batch, MemoryReading, StepMetrics
from memconsole_trainer.host import heap
from memconsole_trainer.loop.watch import Watch
from memconsole_trainer.process_group import SingleProcess

SETTINGS: dict[str, Any] = {
    "hybrid.mode": "aggressive",
    "hybrid.warmup_steps": 1,
    "hybrid.full_steps": 2 * LEAST,
    "hybrid.snapshot_stride": 1,
    "hybrid.snapshots": 6,
    "hybrid.correction_interval": 20,
    "hybrid.confidence": 0.0,
}


class ScriptedJumps:
    """Every jump lowers the loss, unless the loss is `now`."""

    now: float | None = None
    held = most = 0
    """Snapshots now, and at most."""

    def snapshot(self) -> None:
        self.held += 1
        self.most = max(self.most, self.held)

    def forget(self, count: int) -> None:
        assert 0 <= count <= self.held
        self.held -= count

    def products(self, pairs: Any) -> dict[str, Any]:
        assert len(pairs) >= LEAST_PAIRS
        return {"w": np.eye(len(pairs))}

    def begin(self, path: Any) -> None: ...

    def loss(self, batch: Batch, scale: float) -> float:
        return 4.0 - scale if scale or self.now is None else self.now

    def losses(self, batch: Batch, scale: float) -> Any:
        return np.full(2, self.loss(batch, scale) / 2)

    def end(self, scale: float) -> None:
        self.moved_by = scale

    def settle(self) -> None: ...


class ScriptedEngine:
    """Reports the loss of a step that it is told."""

    def __init__(self, kind: str = "cpu") -> None:
        self.jumps, self.calls, self.loss, self.kind = ScriptedJumps(), list[str](), 2.0, kind
        self.norm, self.device = 1.0, self

    def train_step(self, batch: Batch) -> None: ...

    def take_metrics(self) -> list[StepMetrics]:
        return [StepMetrics(1, self.loss, self.norm, 1e-3)]

    def count_step(self, loss: float) -> None: ...

    process_group = SingleProcess()

    def memory(self) -> MemoryReading:
        return MemoryReading(1, 1, 1, None, None)

    def memories(self) -> tuple[MemoryReading, ...]:
        return (self.memory(),)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append(name)


def batch() -> Batch:
    return Batch({"x": np.zeros((1, 4, 2), np.float32)}, 4.0)


def take(control: Hybrid, engine: ScriptedEngine, steps: int = 1) -> None:
    for _ in range(steps):
        control.step(cast(Any, engine), batch())
        control.prepare(cast(Any, engine))


def begun(kind: str = "cpu", **settings: Any) -> tuple[Hybrid, ScriptedEngine]:
    """A controller before the last step of its first full phase."""
    control, engine = Hybrid(replace(Plan(), {**SETTINGS, **settings}), 1000), ScriptedEngine(kind)
    control.prepare(cast(Any, engine))
    take(control, engine, 2 * LEAST)
    assert control.phase == "full"
    return control, engine


@pytest.mark.parametrize("predictor", ["extrapolate", "dmd", "nowcast"])
def test_a_predict_phase_ends_before_its_path_has_too_few_movements(predictor: str) -> None:
    control, engine = begun(**{"hybrid.predictor": predictor})
    take(control, engine)
    jumps = 0
    while control.phase == "predict":
        take(control, engine)
        jumps += 1
    assert control.phase == "correct"
    assert jumps == 4  # of five movements among six snapshots, the fourth jump leaves one


def test_a_divergent_last_step_of_a_full_phase_is_followed_by_another_full_phase() -> None:
    control, engine = begun()
    engine.norm = 150.0
    take(control, engine)
    assert (control.phase, control.state()["phases"]["taken"]) == ("full", 0)
    control, engine = begun()
    take(control, engine)
    assert control.phase == "predict"


def test_no_more_snapshots_are_held_than_the_plan_says_while_one_is_added() -> None:
    control, engine = begun()
    assert engine.jumps.held == 6
    take(control, engine, 3)
    assert control.phase == "predict"
    assert (engine.jumps.held, engine.jumps.most) == (6, 6)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_heap_of_a_cpu_gives_back_what_it_keeps_every_few_steps(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step of a phase with gradients, and before every tenth after it."""
    trimmed = list[int]()
    monkeypatch.setattr(heap, "trim", lambda: trimmed.append(1))
    control, engine = begun(kind)
    once = 1 + 2 * LEAST // TRIM_EVERY
    assert len(trimmed) == (once if kind == "cpu" else 0)
    engine.norm = 150.0
    take(control, engine, 2)  # another full phase follows
    assert len(trimmed) == (once + 1 if kind == "cpu" else 0)


@pytest.mark.parametrize("now", [math.inf, math.nan])
def test_a_batch_without_a_finite_loss_confirms_no_jump(now: float) -> None:
    control, engine = begun()
    take(control, engine)
    engine.jumps.now = now
    take(control, engine)
    assert engine.jumps.moved_by == 0.0
    assert control.state()["residuals"][-1]["predicted"] == 0.0


@pytest.mark.parametrize(("kind", "waits"), [("cpu", 1), ("gpu", 0)])
def test_the_loop_does_not_wait_for_state_that_comes_back_beside_the_next_jump(
    kind: str, waits: int
) -> None:
    control, engine = begun(**{"hybrid.memory": "pinned", "hybrid.correction_interval": 2})
    engine.kind = kind
    watch = Watch(cast(Any, _Attempt()), cast(Any, engine), cast(Any, _Progress()))
    take(control, engine)
    watch.enter(control.phase)
    control.step(cast(Any, engine), batch())
    assert (watch.phase, control.phase) == ("predict", "restore")
    engine.calls.clear()
    watch.change_phase(cast(Any, control))
    fetched = engine.calls.index("fetch")
    assert engine.calls[fetched:].count("synchronize") == waits
    assert engine.calls[-1] == "reset_peak"


class _Progress:
    step = 1


class _Attempt:
    def emit(self, event: Any) -> None: ...

    def progress(self, phase: str, step: int) -> None: ...
