"""Real runs of both trainers on this machine's CPU: estimated against measured growth of resident memory.

    python tests/accuracy/cpu.py [--backend torch|jax] [--first SEED] [--plans N] [--write | --outside | --compiler | --jemalloc]

Each plan trains a few steps, evaluates, samples and saves, as a person's run does. ``--write`` fits the
runtime coefficients to runs (of seeds of their own, see `FITTED`) instead of reporting; ``--outside`` only those of
what happens outside a training step: evaluating, saving, compiling; ``--compiler`` what torch.compile takes, to
some of those runs with and without it; ``--jemalloc`` what that library keeps of freed memory, to those runs with it. `speed.py` measures and fits the time of a step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.devices.budget import budget
from memconsole.memory import coefficients as numbers
from memconsole.memory.estimate import table_of
from memconsole.plan.plan import Plan, apply_settings
from tests.accuracy.cpu_fit import COEFFICIENTS, fit, fit_jemalloc
from tests.accuracy.results import (
    MIB,
    Bar,
    Case,
    Errors,
    Part,
    stored,
    unavailable,
    write,
)

DEFAULT = (-3, -2, -1)
"""In place of seeds: runs of the default plan."""
REPORTED = (*DEFAULT, *range(500, 512))
FITTED = range(0, 16)
"""Other plans than those reported."""
WHOLE = {
    "data.max_examples": "1000000",
    "data.shuffle_buffer": "10000",
    "train.max_steps": "12",
}
"""What the runs behind ``--outside`` have in place of `FIXED`: between steps a run still holds what its text took."""
COMPILED = range(0, 6)
"""Of those, the ones that run with torch.compile, too."""
BAR = Bar(within=0.10)
FIXED = {
    "device.name": "cpu",
    "data.max_examples": "30",
    "data.shuffle_buffer": "1000",
    "train.max_steps": "4",
    "train.log_every": "1",
    "train.warmup_steps": "1",
    "train.evaluation_batches": "1",
    "train.sample_tokens": "8",
}


def settings(seed: int, backend: str) -> dict[str, str]:
    """A plan of 1 to 30 million parameters that takes well under a minute; below 0 the default plan."""
    if seed < 0:
        return {"device.name": "cpu", "backend": backend, "train.max_steps": "60"}
    rng = random.Random(seed)
    rank = rng.choice((0, 0, 0, 8, 32))
    drawn = {
        "backend": backend,
        "model.name": "stories",
        "model.weights": "random",
        "model.target_params": rng.choice((1_000_000, 3_000_000, 8_000_000, 8_000_000, 16_000_000, 30_000_000)),
        "data.vocab_size": rng.choice((1024, 4096)),
        "data.sequence_length": rng.choice((64, 100, 128, 256, 384)),
        "train.batch_size": rng.choice((2, 3, 5, 8)),
        "optimize.precision": rng.choice(("fp32", "fp32", "bf16")),
        "optimize.gradient_checkpointing": rng.choice(("none", "none", "selective", "full")),
        "optimize.accumulation_steps": rng.choice((1, 1, 3)),
        "optimize.optimizer": rng.choice(("adamw", "adamw", "adamw-8bit", "adafactor", "lion", "sgd")),
        "optimize.fused_loss": rng.random() < 0.3,
        "optimize.lora_rank": rank,
        "optimize.freeze_base": rank > 0,
        "optimize.heap": rng.choice(("fast", "tight")),
    }  # fmt: skip
    return {**FIXED, **{key: _word(value) for key, value in drawn.items()}}


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def words(seed: int, wanted: Mapping[str, str]) -> str:
    """How results name a plan."""
    drawn = (f"{k.rpartition('.')[2]}={v}" for k, v in wanted.items() if k not in FIXED)
    return f"the default plan, run {-seed}" if seed < 0 else " ".join(drawn)


def run(wanted: dict[str, str]) -> dict[str, Any]:
    """The report of a real run, in folders of its own."""
    command = [sys.executable, "-m", "memconsole", "train", "--json", "--force"]
    for key, value in wanted.items():
        command += ["--set", f"{key}={value}"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as state:
        # A cache of its own as well, so that JAX compiles as it does the first time.
        environment = {**os.environ, "XDG_STATE_HOME": state, "XDG_CACHE_HOME": state}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


class Outcome:
    """One run: its plan, what was estimated and what was measured."""

    def __init__(
        self, seed: int, backend: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        wanted = {**settings(seed, backend), **more}
        self.plan = apply_settings(Plan(), [f"{key}={value}" for key, value in wanted.items()])
        self.words = words(seed, wanted)
        start = time.monotonic()
        report = run(wanted)
        self.seconds = time.monotonic() - start
        self.measured = report["memory"]["measured"]
        self.by_phase = report["memory"].get("by_phase", {})
        self.table = table_of(self.plan, budget(self.plan, None))
        self.tokens_per_second = max(step["tokens_per_second"] for step in report["steps"])
        print(
            f"{seed:4} {backend:5} peak {self.peak.error:+6.1%} {self.peak.measured_bytes / MIB:7.1f} MiB "
            f"({(self.peak.estimated_bytes - self.peak.measured_bytes) / MIB:+.1f}), "
            f"host {self.host.error:+6.1%} {self.host.measured_bytes / MIB:7.1f} MiB "
            f"({(self.host.estimated_bytes - self.host.measured_bytes) / MIB:+.1f}), "
            f"{self.tokens_per_second:,.0f} tokens/s, {self.seconds:.0f} s  {self.words}",
            flush=True,
        )

    @property
    def peak(self) -> Case:
        return Case(
            plan=self.words,
            estimated_bytes=self.table.peak_bytes,
            measured_bytes=self.measured["peak_bytes"],
        )

    @property
    def host(self) -> Case:
        return Case(
            plan=self.words,
            estimated_bytes=self.table.host_bytes,
            measured_bytes=self.measured["host_bytes"],
        )


def fit_compiler() -> None:
    """Put into the coefficients file what runs with torch.compile hold beyond their estimates, but for what they hold
    so without it."""
    costs = numbers.runtime("torch", "cpu")

    def unexplained(seed: int, *, compiled: bool) -> int:
        one = Outcome(seed, "torch", {"optimize.compile": _word(compiled)})
        found: int = one.peak.measured_bytes - one.peak.estimated_bytes
        return found

    taken = [
        unexplained(seed, compiled=True) - unexplained(seed, compiled=False) for seed in COMPILED
    ]
    found = int(statistics.median(taken)) + costs.compiler_bytes
    document = json.loads(COEFFICIENTS.read_text())
    for kind in document["runtime"]["torch"].values():
        kind["compiler_bytes"] = found
    COEFFICIENTS.write_text(json.dumps(document, indent=1) + "\n")
    each = ", ".join(f"{(bytes + costs.compiler_bytes) / MIB:.1f}" for bytes in taken)
    print(f"torch.compile takes {found / MIB:.1f} MiB ({each})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=("torch", "jax"))
    parser.add_argument("--first", type=int, help="first seed; -3 to -1 are the default plan")
    parser.add_argument("--plans", type=int, help="how many; other stored results stay")
    parser.add_argument("--write", action="store_true", help="fit the runtime coefficients")
    parser.add_argument("--outside", action="store_true", help="fit those outside training steps")
    parser.add_argument("--compiler", action="store_true", help="fit what torch.compile takes")
    parser.add_argument("--jemalloc", action="store_true", help="fit what jemalloc keeps")
    options = parser.parse_args()
    if options.compiler:
        fit_compiler()
        return
    fits = options.write or options.outside
    seeds: Sequence[int] = FITTED if fits else REPORTED
    if options.first is not None:
        seeds = range(options.first, options.first + (options.plans or 1))
    backends = options.backend or ["torch", "jax"]
    missing = [name for name in backends if importlib.util.find_spec(name) is None]
    if missing:
        unavailable(f"{' and '.join(missing)} not installed")
    rows: list[Errors] = []
    if options.jemalloc:
        for backend in backends:
            more = {"optimize.heap": "jemalloc"}
            fit_jemalloc(backend, [Outcome(seed, backend, more) for seed in FITTED])
        return
    for backend in backends:
        more = WHOLE if options.outside else {}
        outcomes = [Outcome(seed, backend, more) for seed in seeds]
        if fits:
            fit(backend, outcomes, steps=options.write)
        rows += [
            Errors(
                estimate=f"{backend} ~ peak on a CPU",
                truth="growth of the trainer's resident memory over its idle start",
                bar=BAR,
                cases=tuple(o.peak for o in outcomes),
            ),
            Errors(
                estimate=f"{backend} ~ host bytes",
                truth="peak resident memory of the trainer's process tree",
                bar=BAR,
                cases=tuple(o.host for o in outcomes),
            ),
        ]
    if not set(seeds) <= set(REPORTED):
        print("\n".join(" | ".join(row.cells()) for row in rows))
        return
    old = [row for old in stored() if old.name == "cpu" for row in old.rows]
    rows = _merged(rows, [row for row in old if isinstance(row, Errors)])
    part = Part(name="cpu", command="python tests/accuracy/cpu.py", rows=tuple(rows))
    write(part, packages=("torch", "jax"))


def _merged(rows: Sequence[Errors], old: Sequence[Errors]) -> list[Errors]:
    """`rows`, with the stored cases of plans that did not run now, and the stored rows of a backend that did not."""
    found = []
    for row in rows:
        ran = {case.plan for case in row.cases}
        before = [case for one in old if one.estimate == row.estimate for case in one.cases]
        cases = (*row.cases, *(case for case in before if case.plan not in ran))
        found.append(msgspec.structs.replace(row, cases=cases))
    names = {row.estimate for row in rows}
    return found + [row for row in old if row.estimate not in names]


if __name__ == "__main__":
    main()
