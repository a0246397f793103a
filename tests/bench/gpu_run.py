"""Steps of one contender on one device, in a process of its own: seconds of each step and peak bytes, as JSON.

    python tests/bench/gpu_run.py CONTENDER SETTLING STEPS [LOCK] < plan.toml

CONTENDER is memconsole, nanoGPT or Trainer. The device and the model are those of the plan. nanoGPT is the checkout
that NANOGPT_DIR names; it is compiled where the device is a card. SETTLING steps come first and are not counted. With
a LOCK, the name of a file, contenders that share it get ready at the same time, and then take turns.
"""

from __future__ import annotations

import fcntl
import importlib
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np

from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.plan import Plan
from memconsole.plan.plan_file import loads
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.weights.config_json import config

DRAWN = 2**20


class Repeated:
    """A weight source that draws few numbers and repeats them: like drawn weights for speed, but at hand at once."""

    def __init__(self, architecture: Architecture) -> None:
        self._shapes = {p.name: p.shape for p in parameters(architecture)}
        self._drawn = np.random.default_rng(0).standard_normal(DRAWN, np.float32) * np.float32(0.02)

    def names(self) -> list[str]:
        return list(self._shapes)

    def tensor(self, name: str) -> Any:
        return np.resize(self._drawn, self._shapes[name])


def tokens(plan: Plan, a: Architecture) -> tuple[Any, Any]:
    """Random inputs and targets of one micro-batch, (1, rows, length) each."""
    shape = (2, 1, plan.train.batch_size, plan.data.sequence_length)
    inputs, targets = np.random.default_rng(0).integers(0, a.vocab_size, shape).astype(np.int32)
    return inputs, targets


class Turns:
    """Counts the seconds of steps after the first few, alone on the card."""

    def __init__(self, settling: int, steps: int, lock: str | None) -> None:
        self._settling, self.steps = settling, settling + steps
        self._lock = open(lock, "w") if lock else None  # noqa: SIM115 -- kept until the process ends
        self._take(fcntl.LOCK_SH)  # others get ready too
        self._ends: list[float] = []
        self._done = 0

    def after_step(self) -> None:
        """Call after each step, when the device is idle."""
        self._done += 1
        if self._done == self._settling:
            self._take(fcntl.LOCK_UN)
            self._take(fcntl.LOCK_EX)
        if self._done >= self._settling:
            self._ends.append(time.perf_counter())

    def run(self, step: Callable[[], object]) -> list[float]:
        """Take all steps; `step` waits for the device. Returns the seconds of each that counts."""
        for _ in range(self.steps):
            step()
            self.after_step()
        return self.seconds()

    def seconds(self) -> list[float]:
        return [later - end for end, later in itertools.pairwise(self._ends)]

    def _take(self, kind: int) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, kind)


def memconsole(plan: Plan, a: Architecture, turns: Turns) -> dict[str, Any]:
    engine = importlib.import_module(f"memconsole_{plan.backend}.engine").create(plan, None)
    engine.build(plan, a, 100, Repeated(a))
    batch = language_batch(*tokens(plan, a))

    def step() -> None:
        engine.train_step(batch)
        engine.synchronize()

    seconds = turns.run(step)
    engine.take_metrics()
    return {"seconds": seconds, "peak_bytes": engine.memory().peak_bytes}


def nanogpt(plan: Plan, a: Architecture, turns: Turns) -> dict[str, Any]:
    """The model and optimizer of nanoGPT in a loop like that of its bench.py."""
    import torch

    sys.path.insert(0, os.environ["NANOGPT_DIR"])
    model_py = importlib.import_module("model")
    device, kind = plan.device.name, plan.device.name.partition(":")[0]
    shape = {"n_layer": a.layers, "n_head": a.heads, "n_embd": a.hidden_size}
    length = plan.data.sequence_length
    model = model_py.GPT(
        model_py.GPTConfig(block_size=length, vocab_size=a.vocab_size, dropout=0.0, **shape)
    ).to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), kind)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    compiled: Any = torch.compile(model) if kind == "cuda" else model
    x, y = (torch.from_numpy(part[0]).long().to(device) for part in tokens(plan, a))

    def step() -> None:
        with torch.autocast(kind, dtype=torch.bfloat16):
            _, loss = compiled(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait(kind)

    return {"seconds": turns.run(step), "peak_bytes": _peak(kind)}


def trainer(plan: Plan, a: Architecture, turns: Turns) -> dict[str, Any]:
    """transformers' Trainer with its defaults and bf16."""
    import transformers

    kind = plan.device.name.partition(":")[0]
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config(a))
    )
    (rows,) = tokens(plan, a)[0]
    data = [{"input_ids": row.astype(np.int64), "labels": row.astype(np.int64)} for row in rows]

    class Clock(transformers.TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            _wait(kind)
            turns.after_step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=kind == "cpu",
            bf16=True,
            per_device_train_batch_size=len(rows),
            max_steps=turns.steps,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Clock()]).train()
    return {"seconds": turns.seconds(), "peak_bytes": _peak(kind)}


def _wait(kind: str) -> None:
    if kind == "cuda":
        importlib.import_module("torch").cuda.synchronize()


def _peak(kind: str) -> int:
    """What torch's allocator held at most; on a CPU the resident memory of the process."""
    if kind == "cuda":
        return int(importlib.import_module("torch").cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


CONTENDERS = {"memconsole": memconsole, "nanoGPT": nanogpt, "Trainer": trainer}


def main() -> None:
    plan = loads(sys.stdin.read())
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # frameworks print; the answer stays alone
    contender, settling, steps, *lock = sys.argv[1:]
    turns = Turns(int(settling), int(steps), lock[0] if lock else None)
    found = CONTENDERS[contender](plan, catalog.architecture(plan), turns)
    with os.fdopen(answer, "w") as stream:
        stream.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
