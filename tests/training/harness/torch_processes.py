"""A few steps of torch engines, each in a process of its own, that train together."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks import task_of
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole_trainer.engine import Batch
from memconsole_trainer.weights.initialize import InitialWeights

ROWS, LENGTH, STEPS = 8, 16, 20
TILE = 24
"""Tokens of a tile of the MLP, where a plan has tiles."""
TEXT: dict[str, Any] = {
    "model.target_params": 200_000,
    "data.vocab_size": 300,
    "data.sequence_length": LENGTH,
    "train.learning_rate": 3e-3,
    "train.warmup_steps": 0,
    "device.name": "cpu",
}
SOURCES = {"lqr": "lqr", "efficientids": "ratings"}
"""The catalog's data of a model. No data are read."""


class Trained(NamedTuple):
    """What some steps gave."""

    losses: list[float]
    norms: list[float]
    evaluated: tuple[float, ...]
    """The summed loss and measures of an evaluation after the last step."""
    state: dict[str, np.ndarray]
    sampled: list[int]
    outputs: list[float]
    """The log-likelihoods of the rows of a batch, if the plan learns preferences."""
    exchange_seconds: float | None = None
    """Of the steps; None where devices exchange within a program."""


def plan_of(count: int, changes: Mapping[str, Any]) -> Plan:
    """A plan with `ROWS` rows a step, whatever the number of devices and of micro-batches."""
    settings = {**TEXT, **changes}
    rows = ROWS // count // settings.get("optimize.accumulation_steps", 1)
    plan = replace(Plan(), {**settings, "device.count": count, "train.batch_size": rows})
    check(plan)
    check_trainable(plan)
    return plan


def preferring(folder: Path) -> dict[str, Any]:
    """Settings with which a plan learns preferences."""
    source = folder / "pairs.jsonl"
    source.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    return {"train.objective": "dpo", "data.template": "prompt", "data.source": str(source)}


def batch_of(plan: Plan, number: int) -> Batch:
    """Random rows of the plan's task, some of them masked."""
    rng = np.random.default_rng(number)
    model = catalog.model(plan)
    steps = plan.optimize.accumulation_steps
    shape = (steps, ROWS // steps)
    arrays: dict[str, Any] = {}
    counted = 0.0
    for array in task_of(plan).inputs(plan, model):
        size = (*shape, *array.shape)
        if array.dtype == "int32":
            drawn = rng.integers(1, 99, size, np.int32)
        elif array.name == "mask":
            drawn = rng.integers(0, 2, size).astype(np.float32)
            counted = float(drawn.sum())
        else:
            drawn = rng.standard_normal(size, np.float32)
        if array.name == "targets" and array.dtype == "int32":
            drawn[:, 1, LENGTH // 2 :] = array.fill
            counted = float((drawn != array.fill).sum())
        arrays[array.name] = drawn
    return Batch(arrays, counted)


def steps_of(
    plan: Plan,
    state: dict[str, np.ndarray] | None = None,
    steps: int = 3,
    pause_seconds: float = 0.0,
) -> Trained:
    """Steps of the plan from `state` or the beginning, in this process, with a pause before each."""
    import torch

    from memconsole_torch import engine as torch_engine
    from memconsole_torch.techniques.activations import tiled_mlp

    torch.set_num_threads(1)
    engine = torch_engine.create(plan, None)
    model = catalog.model(plan)
    with patch.object(tiled_mlp, "tile_tokens", lambda _: TILE):
        engine.build(plan, model, STEPS, InitialWeights(model, plan.train.seed))
    if state is not None:
        engine.load_state(Stored(state))
    for number in range(steps):
        time.sleep(pause_seconds)
        engine.train_step(batch_of(plan, number))
    exchanged = engine.process_group.exchange_seconds
    metrics = engine.take_metrics()
    total = engine.evaluate([batch_of(plan, 99)])
    found = {name: np.array(array) for name, array in engine.state()}
    text = task_of(plan).name == "language"
    return Trained(
        [m.loss for m in metrics],
        [m.gradient_norm for m in metrics],
        (total.loss, *total.measures),
        found,
        engine.generate([1, 2, 3], 4) if text else [],
        outputs_of(engine, plan),
        exchanged,
    )


def outputs_of(engine: Any, plan: Plan) -> list[float]:
    """The log-likelihoods of the rows of one micro-batch; empty if the plan learns no preferences."""
    if not plan.learns_pairs:
        return []
    first = {name: array[:1] for name, array in batch_of(plan, 7).arrays.items()}
    found: list[float] = engine.outputs(Batch(first, 1.0)).tolist()
    return found


class Stored:
    """A `StateSource` of arrays."""

    def __init__(self, state: dict[str, np.ndarray]) -> None:
        self._state = state

    def names(self) -> list[str]:
        return list(self._state)

    def tensor(self, name: str) -> np.ndarray:
        return self._state[name]


def together(
    plan: Plan,
    state: dict[str, np.ndarray] | None = None,
    steps: int = 3,
    pauses: Mapping[int, float] = MappingProxyType({}),
) -> list[Trained]:
    """What each of the plan's processes gave. `pauses` are seconds before each step, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.harness.preloaded"])
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    pipes, ranks = [], []
    for rank in range(plan.device.count):
        mine, other = context.Pipe()
        process = context.Process(
            target=_rank, args=(rank, port, other, plan, state, steps, pauses.get(rank, 0.0))
        )
        process.start()
        other.close()
        pipes.append(mine)
        ranks.append(process)
    try:
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in ranks:
            process.join(30)
            process.kill()


def _rank(
    rank: int,
    port: int,
    pipe: Connection,
    plan: Plan,
    state: dict[str, np.ndarray] | None,
    steps: int,
    pause_seconds: float,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(plan.device.count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        MEMCONSOLE_MEMBER="1",
    )
    pipe.send(steps_of(plan, state, steps, pause_seconds))
    pipe.close()
