"""Real runs of both trainers on this machine's CPU: estimated against measured time of a step.

    python tests/accuracy/speed.py [--backend torch|jax] [--write]
    python tests/accuracy/speed.py --card        fits the speed of a GPU to the steps that tests/bench/gpu.py counted

Takes about seven minutes on two idle cores. A run's time is that of its fastest step: whatever else runs here only
slows one down. ``--write`` first fits the shares of the processor's peak rates (`speed` in coefficients.json) to the
plans of `FITTED`. The plans of `BESIDE` differ from the first one there in one setting each, which shows what an
optimization costs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.devices.budget import budget
from memconsole.memory import coefficients as numbers
from memconsole.memory.answers.pace import slowdown
from memconsole.memory.answers.receipts import Machine, Measured
from memconsole.memory.coefficients import Speed
from memconsole.memory.estimate import model_of
from memconsole.memory.seconds import Work, step_work
from memconsole.plan.plan import Plan, apply_settings
from tests.accuracy.cpu import run
from tests.accuracy.cpu_fit import COEFFICIENTS
from tests.accuracy.results import Part, Times, Timing, unavailable, write

FIXED = {
    "device.name": "cpu",
    "model.name": "stories",
    "model.weights": "random",
    "data.max_examples": "60",
    "data.shuffle_buffer": "1000",
    "data.vocab_size": "4096",
    "train.log_every": "1",
    "train.warmup_steps": "1",
    "train.evaluation_batches": "1",
    "train.sample_tokens": "4",
    "train.preflight": "false",
}
SIZES = "model.target_params", "data.sequence_length", "train.batch_size", "train.max_steps"
FITTED = (
    (8_000_000, 128, 8, 8),
    (1_000_000, 128, 16, 30),
    (1_000_000, 32, 4, 60),
    (3_000_000, 64, 8, 25),
    (8_000_000, 384, 2, 8),
    (16_000_000, 256, 4, 6),
    (30_000_000, 128, 2, 8),
)
"""Parameters, sequence length, batch size and steps of plans without optimizations."""
BESIDE = (
    {"optimize.fused_loss": "true"},
    {"optimize.optimizer": "adamw-8bit"},
    {"optimize.gradient_checkpointing": "selective"},
    {"optimize.gradient_checkpointing": "full"},
    {"optimize.accumulation_steps": "3"},
    {"optimize.lora_rank": "8", "optimize.freeze_base": "true"},
)
TIMES_BEFORE, TIMES_AFTER = 2.0, 1.25
"""How far the estimate may be off, either way, before and after one run on the machine."""


CARD = "h100-80gb"
LAUNCHES = {"torch": 0.001, "jax": 0.0004}
"""Seconds of a layer's launches on a GPU, which the steps of large models do not tell: torch's interpreter issues 2,400
kernels of a compiled GPT-2's step in 22 ms, and XLA's program issues its own."""
HERE = Machine("", {"torch": ""})


class Timed:
    """One run: its plan, the work of its step, and the seconds of its fastest step."""

    def __init__(self, backend: str, sizes: tuple[int, ...], more: dict[str, str]) -> None:
        drawn = dict(zip(SIZES, map(str, sizes), strict=True))
        wanted = {"backend": backend, **FIXED, **drawn, **more}
        self.backend, self.more = backend, more
        self.plan = apply_settings(Plan(), [f"{key}={value}" for key, value in wanted.items()])
        self.words = " ".join(
            f"{key.rpartition('.')[2]}={value}" for key, value in (drawn | more).items()
        )
        start = time.monotonic()
        report = run(wanted)
        rate = max(step["tokens_per_second"] for step in report["steps"])
        self.seconds = self.plan.tokens_per_step / rate
        self.work: Work = step_work(self.plan, model_of(self.plan), budget(self.plan, None))
        print(
            f"{backend:5} {1000 * self.seconds:8.1f} ms, estimated {1000 * self.estimated:8.1f} ms, "
            f"run of {time.monotonic() - start:.0f} s  {self.words}",
            flush=True,
        )

    @property
    def estimated(self) -> float:
        return self.work.seconds(numbers.speed("cpu", self.backend))

    def after(self, one: Timed) -> float:
        """The estimated seconds after the run `one` on this machine."""
        seen = Measured(
            plan=one.plan, device_name="", device_total_bytes=None, driver=None, versions=HERE.versions,
            peak_bytes=1, units_per_second=1 / one.seconds,
        )  # fmt: skip
        slower = slowdown(
            self.plan, HERE, [seen], lambda _: 1 / one.estimated, lambda p: p.model.target_params or 0
        )  # fmt: skip
        return self.estimated * (1.0 if slower is None else slower.factor)


class Counted(NamedTuple):
    """A step of `tests/bench/gpu.py`."""

    work: Work
    seconds: float
    more: tuple[()] = ()


def counted(backend: str) -> list[Counted]:
    """The steps on the card, without those that move activations to the host."""
    from tests.bench import gpu

    kept = json.loads(gpu.RESULTS.read_text())["results"]
    found = []
    for case in (*gpu.CASES, *gpu.ladder()):
        for shown, who, plan in gpu.contenders(case, "cuda"):
            row = kept.get(case.name, {}).get(shown)
            if row and who == "memconsole" and plan.backend == backend:
                plan = apply_settings(plan, [f"device.name={CARD}"])
                work = step_work(plan, model_of(plan), budget(plan, None))
                found += [Counted(work, row["step_seconds"])] * (not work.overlapped)
    return found


def fitted(
    runs: Sequence[Timed | Counted], command: str, where: str, overhead: float | None = None
) -> Speed:
    """The speed with the least squares of relative errors: of the plain runs its three numbers, then of the run with
    8-bit state what coding takes. None is negative. `overhead`: the seconds of a layer's launches, if they are known.
    """
    plain = [r for r in runs if not r.more]
    known = overhead or 0.0
    rows = [
        [
            part / r.seconds
            for part in (r.work.arithmetic, r.work.traffic, r.work.launches * (overhead is None))
        ]
        for r in plain
    ]
    # Traffic and arithmetic grow together, so that one may be taken for the other: no traffic is faster than the memory.
    fastest = np.array(
        [1 - (r.work.apart + r.work.traffic + r.work.launches * known) / r.seconds for r in plain]
    )
    slow = _positive(np.array(rows), fastest)
    found = Speed(
        flops_share=round(1 / max(float(slow[0]), 1e-3), 4),
        bandwidth_share=round(1 / (1 + float(slow[1])), 4),
        step_overhead_seconds=round(known + float(slow[2]), 6),
        source=f"{len(plain)} real runs of `{command}` on {where}",
    )
    beyond = [r.seconds - r.work.seconds(found) for r in runs]
    # Beside the first run, which is the same plan with 32-bit state: a plan's own error is no cost of its state.
    coded = [
        (b - beyond[0]) / r.work.coded for r, b in zip(runs, beyond, strict=True) if r.work.coded
    ]
    eight = max(0.0, statistics.median(coded)) if coded else 0.0
    return Speed(**{**_fields(found), "eight_bit_seconds": float(f"{eight:.2g}")})


def _positive(rows: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Non-negative least squares, by trying every set of columns."""
    best, error = np.zeros(rows.shape[1]), float(truth @ truth)
    for count in range(1, rows.shape[1] + 1):
        for columns in map(list, itertools.combinations(range(rows.shape[1]), count)):
            found = np.linalg.lstsq(rows[:, columns], truth, rcond=None)[0]
            left = truth - rows[:, columns] @ found
            if (found >= 0).all() and float(left @ left) < error:
                best, error = np.zeros(rows.shape[1]), float(left @ left)
                best[columns] = found
    return best


def _fields(speed: Speed) -> dict[str, Any]:
    return {name: getattr(speed, name) for name in speed.__struct_fields__}


def keep(kind: str, backend: str, speed: Speed) -> None:
    """Put the speed into the coefficients file."""
    document = json.loads(COEFFICIENTS.read_text())
    document["speed"][kind if backend == "torch" else f"{kind}-{backend}"] = _fields(speed)
    COEFFICIENTS.write_text(json.dumps(document, indent=1) + "\n")
    numbers.coefficients.cache_clear()
    print(f"{backend}: {_fields(speed)}")


def rows_of(backend: str, runs: list[Timed]) -> tuple[Times, ...]:
    """The errors of all runs, then those after the run of the default sizes has corrected them, then what each
    optimization costs."""
    one = next(r for r in runs if not r.more and r.plan.train.batch_size == Plan().train.batch_size)
    first = runs[0]
    before = tuple(Timing(r.words, r.estimated, r.seconds) for r in runs)
    after = tuple(Timing(r.words, r.after(one), r.seconds) for r in runs if r is not one)
    factors = tuple(
        Timing(r.words, r.estimated / first.estimated, r.seconds / first.seconds)
        for r in runs
        if r.more
    )
    truth = "the fastest step of a real run"
    return (
        Times(f"{backend} ~ step time on a CPU", truth, TIMES_BEFORE, before),
        Times(f"{backend} ✓ step time after one run", truth, TIMES_AFTER, after),
        Times(f"{backend} ~ time factor of an optimization", truth, TIMES_AFTER, factors),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=("torch", "jax"))
    parser.add_argument("--write", action="store_true", help="fit the speed first")
    parser.add_argument(
        "--card", action="store_true", help="fit the speed of a GPU instead, and write it"
    )
    options = parser.parse_args()
    backends = options.backend or ["torch", "jax"]
    if options.card:
        for backend in backends:
            runs = counted(backend)
            found = fitted(
                runs, "python tests/bench/gpu.py [--ladder]", f"an {CARD}", LAUNCHES[backend]
            )
            keep("gpu", backend, found)
            print(" ".join(f"{run.work.seconds(found) / run.seconds:.2f}" for run in runs))
        return
    missing = [name for name in backends if importlib.util.find_spec(name) is None]
    if missing:
        unavailable(f"{' and '.join(missing)} not installed")
    rows: list[Times] = []
    for backend in backends:
        timed = [Timed(backend, sizes, {}) for sizes in FITTED]
        timed += [Timed(backend, FITTED[0], more) for more in BESIDE]
        if options.write:
            found = fitted(
                timed, "python tests/accuracy/speed.py --write", f"{os.cpu_count()} cores"
            )
            keep("cpu", backend, found)
        rows += rows_of(backend, timed)
    part = Part(name="speed", command="python tests/accuracy/speed.py", rows=tuple(rows))
    if len(backends) == 1:
        print("\n".join(" | ".join(row.cells()) for row in rows))
        return
    write(part, packages=("torch", "jax"))


if __name__ == "__main__":
    main()
