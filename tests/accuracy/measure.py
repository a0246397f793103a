"""The JAX formula against XLA's plan for this machine's CPU, and how XLA's temporaries overlap there, fitted.

    python tests/accuracy/measure.py xla [--plans N] [--write]

``--write`` puts what was fitted into memconsole/memory/coefficients.json. Prints a table of errors and ends
with the median, the worst under- and the worst over-estimate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from memconsole.memory.jax_moments import moments as jax_moments  # noqa: E402
from memconsole.memory.moments import step_of  # noqa: E402
from memconsole.plan.architecture import Architecture  # noqa: E402
from memconsole.plan.plan import Plan  # noqa: E402
from tests.accuracy.random_plans import describe, draw  # noqa: E402

COEFFICIENTS = ROOT / "memconsole" / "memory" / "coefficients.json"
MIB = 2**20


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
    parser.add_argument("what", choices=("xla",))
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    measure_xla(arguments.plans, arguments.write)


if __name__ == "__main__":
    main()
