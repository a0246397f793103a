"""``python -m tests.training.harness.meshes``: a few steps of JAX engines on several host devices, each
plan on one device and on several. Plans are read from standard input and differences written to standard output, as
JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np

from memconsole.plan import catalog
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.arithmetic import COMPILE
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import torch_processes
from tests.training.harness.step_memory import step_memory
from tests.training.harness.torch_processes import STEPS, Stored, Trained, batch_of, plan_of

DEVICES = 8


def differences(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The greatest differences between a plan on one device and on `count` of them, in a process with
    `DEVICES` host devices."""
    from memconsole.runs.act.environment import trainer_environment

    plan = plan_of(DEVICES, {"backend": "jax", "optimize.sharding": "ddp"})
    found = subprocess.run(
        [sys.executable, "-m", "tests.training.harness.meshes"],
        input=json.dumps(cases),
        env=trainer_environment(plan, {"PATH": "/usr/bin:/bin"}, kind="cpu"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


def steps_of(plan: Plan, state: dict[str, np.ndarray] | None = None) -> tuple[Trained, Any]:
    """Three steps, and the engine that took them."""
    from memconsole_jax import engine as jax_engine

    engine = jax_engine.create(plan, None)
    model = catalog.model(plan)
    engine.build(plan, model, STEPS, InitialWeights(model, plan.train.seed))
    if state is not None:
        engine.load_state(Stored(state))
    for number in range(3):
        engine.train_step(batch_of(plan, number))
    metrics = engine.take_metrics()
    total = engine.evaluate([batch_of(plan, 99)])
    text = "targets" in batch_of(plan, 0).arrays and plan.model.name == "stories"
    found = Trained(
        [m.loss for m in metrics],
        [m.gradient_norm for m in metrics],
        (total.loss, *total.measures),
        {name: np.array(array) for name, array in engine.state()},
        engine.generate([1, 2, 3], 4) if text else [],
        torch_processes.outputs_of(engine, plan),
    )
    return found, engine


def apart(case: dict[str, Any]) -> dict[str, Any]:
    """What differs between one device and several, and what one of several holds."""
    if "task" in case:
        name = case["task"]
        torch_processes.TEXT.clear()
        torch_processes.TEXT.update(
            {"model.name": name, "data.source": torch_processes.SOURCES[name], "device.name": "cpu",
             "train.warmup_steps": 0, "data.sequence_length": 16}
        )  # fmt: skip
    changes = case["changes"] | {"backend": "jax"}
    one, alone = steps_of(plan_of(1, changes))
    plan = plan_of(case["count"], changes | {"optimize.sharding": case["sharding"]})
    many, engine = steps_of(plan)
    again, _ = steps_of(plan, one.state)
    expected, _ = steps_of(plan_of(1, changes), many.state)
    pairs = [(one, many), (again, expected)]
    assert one.state.keys() == many.state.keys()
    return {
        "losses": _most(*((a.losses, b.losses) for a, b in pairs)),
        "norms": _most(*((a.norms, b.norms) for a, b in pairs)),
        "evaluated": _most((one.evaluated, many.evaluated), (one.outputs, many.outputs)),
        "sampled": one.sampled == many.sampled,
        "shapes": all(one.state[n].shape == many.state[n].shape for n in one.state),
        "held": step_memory(engine).argument_size_in_bytes,
        "held_alone": step_memory(alone).argument_size_in_bytes,
    }


def _most(*pairs: tuple[Any, Any]) -> float:
    """The greatest relative difference."""
    return max(abs(x - y) / max(abs(x), 1e-9) for a, b in pairs for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    COMPILE.absent_on.clear()  # what gains nothing on a CPU is tried here, for other devices
    for case in json.load(sys.stdin):
        print(json.dumps(apart(case)), flush=True)
