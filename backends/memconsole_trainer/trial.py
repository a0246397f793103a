"""``python -m memconsole_trainer.trial BACKEND DEVICE``: train a tiny model for a few steps, and print
what works on that device as lines of JSON.

It runs in its own process because a broken driver may crash it or never answer.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from memconsole.plan import catalog
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.units import format_bytes
from memconsole_trainer.backends import engine_factory
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.engine import Batch, Engine
from memconsole_trainer.weights.initialize import InitialWeights

STEPS = 12
"""Steps after the first. Their median is the time of a step."""
ROWS, TOKENS = 4, 128
MUCH_FASTER = 0.5
"""Compiled programs count as reused if a later step takes less than this share of the time until the end of the
first step."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one test: what was tested, its state, and the figures."""

    what: str
    state: str
    """ok | warning | missing"""
    found: str


class TimedSteps(msgspec.Struct, frozen=True):
    """A few steps of one plan."""

    engine: Engine
    ready_seconds: float
    """Build, compilation and first step."""
    step_seconds: float
    """The median of the later steps."""
    losses: tuple[float, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("device")
    options = parser.parse_args()
    try:
        for finding in findings(options.backend, options.device):
            print(msgspec.json.encode(finding).decode(), flush=True)
    except PlanError as error:
        refusal = Finding("training step", "missing", str(error))
        print(msgspec.json.encode(refusal).decode(), flush=True)
        return 1
    return 0


def findings(backend: str, device: str) -> Iterator[Finding]:
    """Try one thing after the other. Raises `PlanError` if the backend cannot use the device."""
    plan = replace(
        Plan(),
        {
            "backend": backend,
            "device.name": device,
            "model.target_params": 1_000_000,
            "data.vocab_size": 1024,
            "data.sequence_length": TOKENS,
            "train.batch_size": ROWS,
            "train.warmup_steps": 0,
        },
    )
    plain = train(plan)
    yield judge_steps("training step", plain)
    yield check_reuse(plain)
    if device != "cpu":
        yield check_transfer(plain.engine)
    yield try_plan("bf16", replace(plan, {"optimize.precision": "bf16"}), plain.step_seconds)
    if backend == "torch":
        compiled = replace(plan, {"optimize.compile": True})
        yield try_plan("torch.compile", compiled, plain.step_seconds)


def train(plan: Plan) -> TimedSteps:
    """Train the plan's model on one random batch. Raises whatever the backend raises."""
    began = time.perf_counter()
    engine = engine_factory(plan.backend)(plan, None)
    architecture = catalog.architecture(plan)
    weights = InitialWeights(architecture, plan.train.seed)
    engine.build(plan, architecture, STEPS + 1, weights)
    batch = random_batch(architecture.vocab_size)
    ends = [began]
    for _ in range(STEPS + 1):
        engine.train_step(batch)
        engine.synchronize()
        ends.append(time.perf_counter())
    losses = tuple(metrics.loss for metrics in engine.take_metrics())
    ready, *later = np.diff(ends).tolist()
    return TimedSteps(engine, ready, float(np.median(later)), losses)


def random_batch(vocab_size: int) -> Batch:
    """A micro-batch of random tokens, (1, ROWS, TOKENS)."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (1, ROWS, TOKENS + 1), np.int32)
    return language_batch(tokens[..., :-1].copy(), tokens[..., 1:].copy())


def judge_steps(what: str, steps: TimedSteps) -> Finding:
    """Whether the losses are numbers and fell. The same batch is learned again and again."""
    first, last = steps.losses[0], steps.losses[-1]
    figures = f"{milliseconds(steps.step_seconds)} a step, loss {first:.2f} to {last:.2f}"
    if not all(math.isfinite(loss) for loss in steps.losses):
        return Finding(what, "missing", f"the loss is not a number after {STEPS} steps: {figures}")
    if last >= first:
        return Finding(what, "warning", f"the loss did not fall: {figures}")
    return Finding(what, "ok", figures)


def check_reuse(steps: TimedSteps) -> Finding:
    """Whether later steps reuse the programs that were prepared and compiled for the first step."""
    ready, step = steps.ready_seconds, steps.step_seconds
    figures = f"first step done after {milliseconds(ready)}, then {milliseconds(step)} a step"
    return Finding("compilation", "ok" if step < MUCH_FASTER * ready else "warning", figures)


def check_transfer(engine: Engine) -> Finding:
    """Whether weights go to the host and back bit for bit."""
    before = dict(weight_copies(engine))
    size = sum(tensor.nbytes for tensor in before.values())
    began = time.perf_counter()
    engine.release("weights")
    engine.synchronize()
    between = time.perf_counter()
    engine.restore("weights")
    engine.synchronize()
    ended = time.perf_counter()
    same = all(np.array_equal(before[name], tensor) for name, tensor in weight_copies(engine))
    figures = (
        f"{format_bytes(size)} of weights to the host in {milliseconds(between - began)} "
        f"and back in {milliseconds(ended - between)}"
    )
    if not same:
        return Finding("transfer", "missing", f"the weights came back changed: {figures}")
    return Finding("transfer", "ok", f"{figures}, unchanged")


def weight_copies(engine: Engine) -> Iterator[tuple[str, NDArray[Any]]]:
    """Copies of the weights on the host."""
    for name, tensor in engine.state():
        if name.startswith("model."):
            yield name, tensor.copy()


def try_plan(what: str, plan: Plan, plain_seconds: float) -> Finding:
    """Whether a plan trains here, and its speed relative to the plain plan."""
    try:
        trained = train(plan)
    except PlanError as error:
        return Finding(what, "warning", str(error))
    except Exception as error:  # noqa: BLE001 - what a compiler or a driver raises is the finding
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Finding(what, "missing", first)
    finding = judge_steps(what, trained)
    speed = plain_seconds / trained.step_seconds
    return Finding(what, finding.state, f"{finding.found}, {speed:.2f} times the speed of fp32")


def milliseconds(seconds: float) -> str:
    """For example "3.2 ms" or "1,240 ms"."""
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds * 1000:,.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
