"""Peak live bytes of each phase of the torch engine's own training step, on the CPU, for small plans."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import Plan, replace
from memconsole_torch import engine as torch_engine
from memconsole_trainer.engine import Batch
from memconsole_trainer.initialize import InitialWeights
from tests.accuracy.torch_liveness import Liveness


def rows(plan: Plan, architecture: Architecture, seed: int = 0) -> Batch:
    """One optimizer step of random tokens."""
    shape = (plan.optimize.accumulation_steps, plan.train.batch_size, plan.data.sequence_length)
    drawn = np.random.default_rng(seed).integers(0, architecture.vocab_size, (2, *shape))
    inputs, targets = drawn.astype(np.int32)
    return Batch(inputs, targets)


def trace(plan: Plan, architecture: Architecture, steps: int = 2) -> Liveness:
    """Run `steps` steps and an evaluation; `.peaks` is by the phases of the memory table."""
    plan = replace(plan, {"device.name": "cpu"})
    engine = torch_engine.create(plan, None)
    live = Liveness()
    with live:
        engine.build(plan, architecture, 10, InitialWeights(architecture, 0))
        gc.collect()
        live.peaks.clear()
        with _phases(engine, live):
            for seed in range(steps):
                live.phase = "forward"
                engine.train_step(rows(plan, architecture, seed))
        live.phase = "evaluation"
        engine.evaluate([rows(plan, architecture, steps)])
        live.phase = "checkpoint"
        for _name, _array in engine.state():
            live.peaks["checkpoint"] = max(live.peaks.get("checkpoint", 0), live.live)
    return live


@contextmanager
def _phases(engine: Any, live: Liveness) -> Iterator[None]:
    backward, step, loss = torch.Tensor.backward, engine._optimizer.step, engine._loss

    def named(phase: str, function: Callable[..., Any], after: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            live.phase = phase
            live.peaks[phase] = max(live.peaks.get(phase, 0), live.live)
            try:
                return function(*arguments, **options)
            finally:
                live.phase = after

        return run

    decoder = engine._decoder
    forward = decoder.forward
    decoder.forward = named("forward", forward, "forward")
    torch.Tensor.backward = named("backward", backward, "optimizer step")
    engine._optimizer.step = named("optimizer step", step, "optimizer step")
    engine._loss = named("loss", loss, "loss")
    try:
        yield
    finally:
        torch.Tensor.backward = backward
        decoder.forward = forward
        engine._optimizer.step, engine._loss = step, loss
