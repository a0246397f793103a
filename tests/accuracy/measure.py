"""Measure the memory formulas against the engines, and fit what only measuring can tell.

    python tests/accuracy/measure.py xla [--plans N]     formula against XLA's plan; fits how temporaries overlap
    python tests/accuracy/measure.py cpu                 formula against real runs of both trainers on this CPU;
                                                         fits runtime bytes and speed
    --write                                              put what was fitted into memconsole/memory/coefficients.json

Each prints a table of errors and ends with the median, the worst under- and the worst over-estimate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from memconsole.devices.budget import budget  # noqa: E402
from memconsole.memory import coefficients as numbers  # noqa: E402
from memconsole.memory.estimate import architecture_of  # noqa: E402
from memconsole.memory.formula import memory_table  # noqa: E402
from memconsole.memory.jax_moments import moments as jax_moments  # noqa: E402
from memconsole.memory.moments import step_of  # noqa: E402
from memconsole.memory.seconds import step_seconds  # noqa: E402
from memconsole.plan.architecture import Architecture  # noqa: E402
from memconsole.plan.plan import Plan, apply_settings  # noqa: E402
from tests.accuracy.random_plans import describe, draw  # noqa: E402

COEFFICIENTS = ROOT / "memconsole" / "memory" / "coefficients.json"
MIB = 2**20
RUNS = (
    (),
    ("optimize.gradient_checkpointing=full", "optimize.fused_loss=true", "train.batch_size=32"),
    ("model.target_params=4_000_000", "data.sequence_length=256", "train.batch_size=8"),
    ("optimize.accumulation_steps=4", "train.batch_size=8", "optimize.optimizer=lion"),
)
"""Settings of the real runs; each trains a few steps and evaluates."""


def training_peak(plan: Plan, architecture: Architecture) -> int:
    """The formula's live bytes at the step's peak, without the runtime's own."""
    step = step_of(plan, architecture, "cpu")
    return max(m.total for m in jax_moments(step) if m.phase not in ("evaluation", "checkpoint"))


def against(truth: Callable[[Plan, Architecture], int], backend: str, plans: int) -> list[float]:
    """Relative errors over seeded random plans, printed as they come."""
    errors = []
    for seed in range(plans):
        architecture, plan = draw(random.Random(seed), backend)
        measured = truth(plan, architecture)
        errors.append(training_peak(plan, architecture) / measured - 1)
        print(
            f"{seed:4} {errors[-1]:+7.1%} {measured / MIB:8.1f} MiB  {describe(plan, architecture)}"
        )
    return errors


def summarize(errors: list[float]) -> None:
    middle = statistics.median(abs(e) for e in errors)
    print(
        f"{len(errors)} plans: median error {middle:.1%}, under at most {min(errors):+.1%}, "
        f"over at most {max(errors):+.1%}"
    )


def measure_xla(plans: int, write: bool) -> None:
    from tests.accuracy.fit_xla import fit
    from tests.accuracy.trace_jax import planned_bytes

    planned: dict[str, int] = {}

    def truth(plan: Plan, architecture: Architecture) -> int:
        found = planned_bytes(plan, architecture)
        planned[describe(plan, architecture)] = found
        return found

    summarize(against(truth, "jax", plans))
    if write:
        cases = [draw(random.Random(seed), "jax") for seed in range(plans)]
        truths = [planned[describe(plan, architecture)] for architecture, plan in cases]
        _write("xla", "cpu", fit(cases, truths))


def measure_cpu(plans: int, write: bool) -> None:
    document: dict[str, dict[str, int]] = {}
    shares = []
    for backend in ("torch", "jax"):
        runtime = numbers.runtime(backend, "cpu")
        residuals, idle, errors = [], [], []
        for settings in RUNS:
            wanted = (
                "device.name=cpu",
                "train.max_steps=8",
                "train.log_every=1",
                f"backend={backend}",
                *settings,
            )
            plan = apply_settings(Plan(), wanted)
            report = _train(wanted)
            measured = report["memory"]["measured"]
            table = memory_table(plan, architecture_of(plan), budget(plan, None))
            residuals.append(measured["peak_bytes"] - table.peak_bytes + runtime.workspace_bytes)
            idle.append(measured["host_bytes"] - table.host_bytes + runtime.host_bytes)
            errors.append(table.peak_bytes / measured["peak_bytes"] - 1)
            rate = max(step["tokens_per_second"] for step in report["steps"])
            estimated = plan.tokens_per_step / step_seconds(
                plan, architecture_of(plan), budget(plan, None)
            )
            shares.append(rate / estimated)
            print(
                f"{backend:5} {errors[-1]:+7.1%} {measured['peak_bytes'] / MIB:8.1f} MiB  host "
                f"{table.host_bytes / measured['host_bytes'] - 1:+.1%} {measured['host_bytes'] / MIB:.0f} MiB  "
                f"{rate:,.0f} tokens/s, estimated {estimated:,.0f}  {' '.join(settings) or 'the default plan'}"
            )
        summarize(errors)
        document[backend] = {
            "workspace_bytes": max(0, int(statistics.median(residuals))),
            "host_bytes": int(statistics.median(idle)),
        }
    # Whatever else runs on the machine only slows a run down, so the fastest says most.
    print(
        f"speed: {max(shares):.2f} of the estimate at best, {statistics.median(shares):.2f} median"
    )
    if write:
        for backend, found in document.items():
            source = f"median over {len(RUNS)} real runs of `python tests/accuracy/measure.py cpu --write`"
            _write("runtime", backend, {"cpu": {**found, "source": source}})
        factor = max(shares)
        old = numbers.speed("cpu")
        _write(
            "speed",
            "cpu",
            {
                "flops_share": round(old.flops_share * factor, 4),
                "bandwidth_share": round(old.bandwidth_share * factor, 4),
                "step_overhead_seconds": round(old.step_overhead_seconds / factor, 6),
                "source": "fastest of the real runs of `python tests/accuracy/measure.py cpu --write` on "
                f"{os.cpu_count()} cores",
            },
        )


def _train(settings: tuple[str, ...]) -> Any:
    """The report of a real run, in a state directory of its own."""
    command = [sys.executable, "-m", "memconsole", "train", "--json"]
    for setting in settings:
        command += ["--set", setting]
    with tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "XDG_STATE_HOME": state}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _write(section: str, name: str, found: dict[str, Any]) -> None:
    """Merge `found` into one entry of the coefficients file."""
    document = json.loads(COEFFICIENTS.read_text())
    entry = document[section][name]
    for key, value in found.items():
        if isinstance(value, dict):
            entry[key].update(value)
        else:
            entry[key] = value
    COEFFICIENTS.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("xla", "cpu"))
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    {"xla": measure_xla, "cpu": measure_cpu}[arguments.what](
        arguments.plans, arguments.write
    )


if __name__ == "__main__":
    main()
