"""Trains the variants that `hybrid.py` compares: hybrid plans, plain training, steps left out, larger rates."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from memconsole.plan import catalog
from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.log import events
from memconsole_torch import engine as torch_engine
from memconsole_trainer.control.controller import Controller, controller_of
from memconsole_trainer.control.plain import Plain
from memconsole_trainer.data.stream import BatchShape, BatchStream
from memconsole_trainer.engine import Batch, Engine
from memconsole_trainer.tasks.opening import open_data
from memconsole_trainer.weights.trained import starting_weights

Settings = Mapping[str, Any]
VALIDATION_BATCHES = 8


@dataclass
class Trained:
    """One run."""

    loss: float
    """Validation loss at its end."""
    gradient_steps: int
    cpu_seconds: float
    """Of steps and transitions; 0 with JAX."""
    predicted: list[int] = field(default_factory=list)
    """The steps that were jumps."""
    jumps: list[tuple[float, float]] = field(default_factory=list)
    """By how much the validation loss fell with each jump that was kept, and the standard error of that."""


class Skipping(Plain):
    """Plain training that leaves some steps out: their batches are read and nothing is done with them."""

    def __init__(self, left_out: list[int]) -> None:
        self._left_out, self._step = set(left_out), 0

    @classmethod
    def of(cls, left_out: list[int], plan: Plan, total_steps: int) -> Skipping:
        """For `trained`."""
        return cls(left_out)

    def step(self, engine: Engine, batch: Batch) -> bool:
        """Take a step, or leave it out."""
        self._step += 1
        if self._step in self._left_out:
            engine.count_step(0.0)  # type: ignore[attr-defined]
            return False
        return super().step(engine, batch)


class _Silent:
    def phase(self, phase: str, detail: str = "") -> None:
        """Says nothing."""

    def warning(self, message: str) -> None:
        """Says nothing."""

    def tick(self) -> None:
        """Does nothing."""

    def wait_while_paused(self) -> None:
        """Does nothing."""


def trained(
    settings: Settings, control: Callable[[Plan, int], Controller] = controller_of
) -> Trained:
    """Train a plan and evaluate it."""
    plan = replace(Plan(), settings)
    engine = _engine(plan)
    steps = plan.train.max_steps or 0
    model = catalog.model(plan)
    with tempfile.TemporaryDirectory() as folder:
        data = open_data(plan, model, Path(folder), _Silent(), {})
        shape = BatchShape(1, plan.train.batch_size, plan.data.sequence_length)
        stream = BatchStream(data.rows(), shape, None)
        engine.build(plan, model, steps, starting_weights(plan, model))
        held = list(data.validation(shape, VALIDATION_BATCHES))
        controller = control(plan, steps)
        found = Trained(0.0, 0, 0.0)
        for step in range(1, steps + 1):
            batch = _next(stream)
            jumping = controller.phase in ("predict", "restore")
            before = _losses(engine, held) if jumping else []
            began = time.process_time()
            controller.prepare(engine)
            found.gradient_steps += controller.step(engine, batch)
            controller.take_metrics(engine)
            if plan.backend == "torch":
                found.cpu_seconds += time.process_time() - began
            for said in controller.take_events():
                if isinstance(said, events.Jump):
                    found.predicted.append(step)
                    if said.accepted:
                        after = _losses(engine, held)
                        falls = [b - a for b, a in zip(before, after, strict=True)]
                        found.jumps.append((mean(falls), stdev(falls) / len(falls) ** 0.5))
        stream.close()
        found.loss = engine.evaluate(held).mean
    return found


def _engine(plan: Plan) -> Engine:
    if plan.backend == "torch":
        return torch_engine.create(plan, None)
    from memconsole_jax import engine as jax_engine

    return jax_engine.create(plan, None)


def _losses(engine: Engine, held: list[Batch]) -> list[float]:
    """The validation loss of each row."""
    found = []
    for batch in held:
        rows = next(iter(batch.arrays.values())).shape[1]
        for row in range(rows):
            part = {name: array[:, row : row + 1] for name, array in batch.arrays.items()}
            found.append(engine.evaluate([Batch(part, batch.weight / rows)]).mean)
    return found


def _next(stream: BatchStream) -> Batch:
    while True:
        batch = stream.next().batch
        if batch is not None:
            return batch


def measured(
    name: str, model: Settings, hybrid: Settings, seeds: int, steps: int, *, short: bool = False
) -> dict[str, Any]:
    """All variants of one model, or the fewer ones, in this process. `hybrid` is what makes its plan a hybrid one."""
    torch.set_num_threads(1)
    variants: dict[str, list[Trained]] = {}

    def keep(variant: str, run: Trained) -> Trained:
        variants.setdefault(variant, []).append(run)
        print(f"{name} {variant}: {run.loss:.4f}, {run.cpu_seconds:.1f} s", file=sys.stderr)
        return run

    for seed in range(1, seeds + 1):
        base = {**model, "train.max_steps": steps, "train.seed": seed}
        near = keep("plain", trained(base))
        jumping = keep("hybrid", trained({**base, **hybrid}))
        if not short:
            skipping = partial(Skipping.of, jumping.predicted)
            near = keep("steps left out", trained({**base, **hybrid}, skipping))
            keep("larger rate", trained({**base, "train.learning_rate": 4e-3}))
        # The run beside it tells what a step costs: on a busy machine the cost of runs further apart
        # differs by more than that of jumps.
        if seconds := near.cpu_seconds / near.gradient_steps:
            same_time = max(1, round(jumping.cpu_seconds / seconds))
            keep("plain, equal time", trained({**base, "train.max_steps": same_time}))
        equal = {**base, "train.max_steps": max(1, jumping.gradient_steps)}
        keep("plain, equal gradient steps", trained(equal))
    jumps = [jump for run in variants["hybrid"] for jump in run.jumps]
    return {
        "steps": steps,
        "seeds": seeds,
        "parameters": sum(p.size for p in catalog.model(replace(Plan(), model)).parameters()),
        "variants": {variant: _summary(runs) for variant, runs in variants.items()},
        "jumps": {
            "tried": sum(len(run.predicted) for run in variants["hybrid"]),
            "kept": len(jumps),
            "kept_and_better": sum(fall > 0 for fall, _ in jumps),
            "worse_than_noise": sum(fall < -2 * error for fall, error in jumps),
            "mean_decrease": mean([fall for fall, _ in jumps]) if jumps else 0.0,
            "worst": min(jumps, default=(0.0, 0.0)),
        },
    }


def _summary(runs: list[Trained]) -> dict[str, Any]:
    losses = [run.loss for run in runs]
    return {
        "losses": [round(loss, 4) for loss in losses],
        "mean": mean(losses),
        "deviation": stdev(losses) if len(losses) > 1 else 0.0,
        "gradient_steps": mean([run.gradient_steps for run in runs]),
        "cpu_seconds": mean([run.cpu_seconds for run in runs]),
    }
