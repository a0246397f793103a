"""What hybrid training gains: its validation loss beside that of plain training, of steps left out, and of larger rates.

    python tests/bench/hybrid.py [--only small|default|10m|default-jax] [--seeds N] [--steps N] [--short] [--print]

`--short` leaves out two variants: steps left out, and the larger rate.

Every variant trains in this process, with torch on one thread, so that seconds of CPU time compare on a busy machine
too. With JAX they would count compilers' time, so that its runs are compared at equal steps alone. Results go to results/hybrid.json and their table into docs/hybrid.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

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
from tests.bench.trained import into_page, machine, markdown

RESULTS = Path(__file__).with_name("results") / "hybrid.json"
PAGE = ROOT / "docs" / "hybrid.md"
MARK = "hybrid-bench"
COMMON = {
    "data.source": "python-stdlib",
    "data.max_examples": 25,
    "train.learning_rate": 2e-3,
    "train.warmup_steps": 40,
    "device.name": "cpu",
    "train.sample_tokens": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "small": {"model.target_params": 300_000, "data.vocab_size": 1024, "data.sequence_length": 64},
    "default": {"model.target_params": 1_000_000},
    "10m": {"model.target_params": 10_000_000},
    "default-jax": {"model.target_params": 1_000_000, "backend": "jax"},
}
STEPS = {"small": 150, "default": 150, "10m": 120, "default-jax": 150}
HYBRID = {"hybrid.mode": "balanced", "hybrid.warmup_steps": 40, "hybrid.predict_precision": "same"}
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


def trained(
    settings: Mapping[str, Any], control: Callable[[Plan, int], Controller] = controller_of
) -> Trained:
    """Train a plan and evaluate it."""
    plan = replace(Plan(), {**COMMON, **settings})
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


def measured(name: str, seeds: int, steps: int, *, short: bool = False) -> dict[str, Any]:
    """All variants of one model, or the fewer ones."""
    variants: dict[str, list[Trained]] = {}

    def keep(variant: str, run: Trained) -> Trained:
        variants.setdefault(variant, []).append(run)
        print(f"{name} {variant}: {run.loss:.4f}, {run.cpu_seconds:.1f} s", file=sys.stderr)
        return run

    for seed in range(1, seeds + 1):
        base = {**MODELS[name], "train.max_steps": steps, "train.seed": seed}
        near = keep("plain", trained(base))
        hybrid = keep("hybrid", trained({**base, **HYBRID}))
        if not short:
            skipping = partial(Skipping.of, hybrid.predicted)
            near = keep("steps left out", trained({**base, **HYBRID}, skipping))
            keep("larger rate", trained({**base, "train.learning_rate": 4e-3}))
        # The run beside it tells what a step costs: on a busy machine the cost of runs further apart
        # differs by more than that of jumps.
        if seconds := near.cpu_seconds / near.gradient_steps:
            same_time = max(1, round(hybrid.cpu_seconds / seconds))
            keep("plain, equal time", trained({**base, "train.max_steps": same_time}))
        equal = {**base, "train.max_steps": max(1, hybrid.gradient_steps)}
        keep("plain, equal gradient steps", trained(equal))
    jumps = [jump for run in variants["hybrid"] for jump in run.jumps]
    return {
        "steps": steps,
        "seeds": seeds,
        "parameters": sum(
            p.size for p in catalog.model(replace(Plan(), MODELS[name])).parameters()
        ),
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


def table(found: Mapping[str, Any]) -> str:
    """The results as the page shows them."""
    rows = [["model", "variant", "validation loss", "gradient steps", "CPU seconds"]]
    lines = []
    for name, result in found["models"].items():
        for variant, v in result["variants"].items():
            loss = f"{v['mean']:.4f} ± {v['deviation']:.4f}"
            seconds = f"{v['cpu_seconds']:.1f}" if v["cpu_seconds"] else "–"
            rows.append([name, variant, loss, f"{v['gradient_steps']:.0f}", seconds])
        j = result["jumps"]
        line = f"- {name}, {result['steps']} steps, {result['seeds']} seeds: {j['tried']} jumps tried, {j['kept']} kept"
        if j["kept"]:
            line += (
                f"; {j['kept_and_better']} of these lowered the loss of other held-out rows, by {j['mean_decrease']:.4f} "
                f"nats on average over all that were kept, at worst {j['worst'][0]:+.4f} ± {j['worst'][1]:.4f} "
                f"(the standard error); {j['worse_than_noise']} raised it by more than two standard errors"
            )
        lines.append(line)
    return "\n".join([markdown(rows, 2), "", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=MODELS, help="measure one model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of a run")
    parser.add_argument("--short", action="store_true", help="leave out two variants")
    parser.add_argument("--print", action="store_true", help="print the stored results")
    arguments = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    if not arguments.print:
        torch.set_num_threads(1)
        for name in [arguments.only] if arguments.only else MODELS:
            with contextlib.redirect_stdout(io.StringIO()):
                steps = arguments.steps or STEPS[name]
                result = measured(name, arguments.seeds, steps, short=arguments.short)
            found = {**found, **machine(), "models": {**found["models"], name: result}}
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        into_page(PAGE, MARK, table(found))
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
