"""The torch trace's timeline against PyTorch's own MemTracker on real steps, over random plans.

    python tests/accuracy/torch_exact.py [--first SEED] [--plans N]

Needs torch, no accelerator: the models are small and really trained, on the CPU. Shown are the plans that miss
by more than 0.1 %.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.memory.exact import affine
from memconsole.memory.exact.timeline import Exact
from memconsole.plan.data.rows import row_bytes
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks import task_of_model
from tests.accuracy.random_plans import describe, draw
from tests.accuracy.results import Bar, Case, Errors, Part, unavailable, write

FIRST, PLANS = 5000, 30
BAR = Bar(within=0.01)
TRAINING = ("forward", "loss", "backward", "optimizer step")
SHOWN = 0.001
STEPS = 2


def drawn(seed: int) -> tuple[Architecture, Plan]:
    """A small model and a plan for it; every fourth trains adapters on a frozen base."""
    rng = random.Random(seed)
    architecture, plan = draw(rng, "torch")
    if rng.random() < 0.25:
        rank = rng.choice((4, 8))
        plan = replace(plan, {"optimize.lora_rank": rank, "optimize.freeze_base": True})
    return architecture, replace(plan, {"device.name": "cpu"})


def random_batch(plan: Plan, model: Model, micro_batches: int) -> Any:
    """Random arrays of the shapes that the model's task names."""
    import numpy as np

    from memconsole_trainer.engine import Batch

    rng = np.random.default_rng(micro_batches)
    arrays: dict[str, Any] = {}
    for array in task_of_model(model).inputs(plan, model):
        shape = (micro_batches, plan.train.batch_size, *array.shape)
        if isinstance(model, Architecture | Recommender):
            most = model.vocab_size if isinstance(model, Architecture) else model.items
            arrays[array.name] = rng.integers(0, most, shape).astype(array.dtype)
        else:
            arrays[array.name] = rng.random(shape, dtype=array.dtype)
    return Batch(arrays, float(next(iter(arrays.values())).size))


def tracked(plan: Plan, model: Model) -> dict[str, int]:
    """MemTracker's peak of real training steps and of an evaluation."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from memconsole_torch import engine as torch_engine
    from memconsole_torch.techniques.optimizer import quantized_adam
    from memconsole_trainer.weights.initialize import InitialWeights

    class Tracker(MemTracker):  # type: ignore[misc,unused-ignore]
        """MemTracker without its tables by module, which take frozen weights and second calls for mistakes."""

        def _nothing(self, *arguments: Any) -> None:
            pass

        _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _nothing

    torch.set_num_threads(1)
    engine = torch_engine.create(plan, None)
    engine.build(plan, model, 10, InitialWeights(model, 0))
    batches = {
        "training": random_batch(plan, model, plan.optimize.accumulation_steps),
        "evaluation": random_batch(plan, model, 2),
    }
    found = {}
    for name, rows in batches.items():
        tracker = Tracker()
        states = [list(state.values()) for state in engine._optimizer.state.values()]
        tracker.track_external(engine.module, states)
        # The optimizer's code tables, which a process makes once, are made in each step, as in a trace.
        tables = patch.object(quantized_adam, "_tables", quantized_adam._tables.__wrapped__)
        with tracker, tables:
            if name == "training":
                for _ in range(STEPS):
                    engine.train_step(rows)
            else:
                engine.evaluate([rows])
        found[name] = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return found


def traced(plan: Plan, model: Model) -> dict[str, int]:
    """The timeline's peaks, evaluated at the plan's sizes, without what no dispatch shows."""
    from memconsole_torch.tracing.trace import record

    timeline = record(plan, model, "cpu", internal=False).timeline
    exact = affine.evaluate(timeline, plan.train.batch_size, plan.data.sequence_length)
    return {"training": peak(exact, TRAINING), "evaluation": peak(exact, ("evaluation",))}


def peak(exact: Exact, phases: tuple[str, ...]) -> int:
    return max(exact.phases[phase].total_bytes for phase in phases)


def held(plan: Plan, model: Model) -> int:
    """Bytes of the step's rows in the host's own arrays, which MemTracker does not see."""
    rows = plan.optimize.accumulation_steps * plan.train.batch_size
    return rows * row_bytes(plan, model)


def compare(seed: int) -> list[Case]:
    """One plan's training and evaluation peaks."""
    architecture, plan = drawn(seed)
    estimated, measured = traced(plan, architecture), tracked(plan, architecture)
    cases = []
    for name, truth in measured.items():
        words = f"{describe(plan, architecture)} rank {plan.optimize.lora_rank}, {name}"
        case = Case(
            plan=words,
            estimated_bytes=estimated[name] - held(plan, architecture),
            measured_bytes=truth,
        )
        cases.append(case)
        if abs(case.error) > SHOWN:
            print(f"{seed:5} {case.error:+7.2%} {truth / 2**20:8.2f} MiB  {words}", flush=True)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=FIRST, help="first seed")
    parser.add_argument("--plans", type=int, default=PLANS)
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        unavailable('torch is not installed: pip install "memconsole[torch]"')
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.monotonic()
    seeds = range(options.first, options.first + options.plans)
    cases = tuple(case for seed in seeds for case in compare(seed))
    print(f"{time.monotonic() - start:.0f} seconds")
    row = Errors(estimate="torch =", truth="MemTracker on real CPU steps", bar=BAR, cases=cases)
    if (options.first, options.plans) == (FIRST, PLANS):
        part = Part(name="torch-exact", command="python tests/accuracy/torch_exact.py", rows=(row,))
        write(part, packages=("torch",))
    else:
        print(" | ".join(row.cells()))


if __name__ == "__main__":
    main()
