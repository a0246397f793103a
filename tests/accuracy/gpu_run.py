"""One plan's engine on one device, in a process of its own: what its allocator and its driver counted.

    python tests/accuracy/gpu_run.py DEVICE < plan.toml

DEVICE is cuda or cpu. Builds the model with weights that are all zero, takes a few steps on random tokens
and evaluates once, and prints one JSON object; the catalog's models need no download for that.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import pynvml

from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, replace
from memconsole.plan.plan_file import loads
from memconsole.plan.tasks import task_of
from memconsole_trainer.engine import Batch
from memconsole_trainer.host.gpu_memory import GpuMemory

STEPS = 3


class Zeros:
    """A weight source whose weights take no time to draw."""

    def __init__(self, model: Model) -> None:
        self._shapes = {p.name: p.shape for p in model.parameters()}

    def names(self) -> list[str]:
        return list(self._shapes)

    def tensor(self, name: str) -> Any:
        return np.zeros(self._shapes[name], np.float32)


def batch(plan: Plan, model: Model, micro_batches: int) -> Batch:
    """Random numbers, which are valid in the plan's task."""
    draw, arrays = np.random.default_rng(0), {}
    highest = model.vocab_size if isinstance(model, Architecture) else 2
    for array in task_of(plan).inputs(plan, model):
        shape = (micro_batches, plan.train.batch_size, *array.shape)
        numbers = draw.integers(0, highest, shape) if array.dtype == "int32" else draw.random(shape)
        arrays[array.name] = numbers.astype(array.dtype)
    return Batch(arrays, float(micro_batches * plan.train.batch_size))


def run(plan: Plan) -> dict[str, Any]:
    """Train and evaluate; bytes by the engine's, the allocator's and the driver's account."""
    model = catalog.model(plan)
    engine = importlib.import_module(f"memconsole_{plan.backend}.engine").create(plan, None)
    engine.build(plan, model, 100, Zeros(model))
    steps = plan.optimize.accumulation_steps
    for _ in range(STEPS):
        engine.train_step(batch(plan, model, steps))
    engine.synchronize()
    engine.take_metrics()
    engine.evaluate([batch(plan, model, 1), batch(plan, model, 1)])
    engine.synchronize()
    reading = engine.memory()
    found: dict[str, Any] = {
        "allocated_bytes": reading.peak_bytes,
        "reserved_bytes": None,
        "device_bytes": None,
        "device_total_bytes": reading.device_total_bytes,
        "versions": dict(engine.versions),
        "device": engine.device.name,
    }
    if engine.device.kind == "gpu":
        if plan.backend == "torch":
            torch = importlib.import_module("torch")
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
            found["held_bytes"] = torch.cuda.memory_reserved()
        found |= driver()
    return found


def driver() -> dict[str, Any]:
    """What NVML charges this process, and which driver says so."""
    memory = GpuMemory()
    memory.open()
    version = pynvml.nvmlSystemGetDriverVersion()
    return {
        "device_bytes": next(iter(memory.charged()), None),
        "driver": version if isinstance(version, str) else version.decode(),
    }


def main() -> None:
    device = {"cuda": "cuda:0", "cpu": "cpu"}[sys.argv[1]]
    plan = replace(loads(sys.stdin.read()), {"device.name": device})
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # frameworks print; the answer stays alone
    with os.fdopen(answer, "w") as stream:
        stream.write(json.dumps(run(plan)) + "\n")


if __name__ == "__main__":
    main()
