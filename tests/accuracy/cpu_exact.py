"""Traced and compiled numbers of both backends against the real runs on a CPU that cpu.py stored.

    python tests/accuracy/cpu_exact.py [--backend torch|jax]

Trains nothing: asked are the tracers, about the very plans of results/cpu.json, in the versions installed here.
On a CPU the compiled program that XLA plans is the one that runs, so that a run is its truth; for other devices
it is the device's own count, see gpu.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.cli.plans.exact import wait_for_exact
from memconsole.devices.budget import budget
from memconsole.memory.estimate import table_of
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.plan.plan import Plan, apply_settings
from tests.accuracy.cpu import BAR, REPORTED, settings, words
from tests.accuracy.results import MIB, Case, Errors, Part, stored, unavailable, write

BACKENDS = ("torch", "jax")
SECONDS = 240.0
"""The most that one plan's answer is waited for."""


def measured(backend: str) -> dict[str, int]:
    """Peak bytes of stored runs by the plan's words."""
    rows = [row for part in stored() if part.name == "cpu" for row in part.rows]
    return {
        case.plan: case.measured_bytes
        for row in rows
        if isinstance(row, Errors) and row.estimate == f"{backend} ~ peak on a CPU"
        for case in row.cases
    }


def compared(backend: str) -> tuple[Case, ...]:
    """The exact peak of each stored run's plan."""
    truths, cases = measured(backend), []
    book = ExactBook()
    try:
        for seed in REPORTED:
            wanted = settings(seed, backend)
            name = words(seed, wanted)
            if name not in truths:
                continue
            plan = apply_settings(Plan(), [f"{key}={value}" for key, value in wanted.items()])
            device = budget(plan, None)
            problem = wait_for_exact(book, plan, device, SECONDS)
            if problem:
                print(f"{backend} {seed}: {problem}")
                continue
            table = table_of(plan, device, book.lookup)
            case = Case(plan=name, estimated_bytes=table.peak_bytes, measured_bytes=truths[name])
            cases.append(case)
            by_formula = table.formula.peak_bytes / truths[name] - 1 if table.formula else 0.0
            print(
                f"{seed:4} {backend:5} = {case.error:+6.1%} (~ {by_formula:+6.1%}) "
                f"{case.measured_bytes / MIB:7.1f} MiB  {name}",
                flush=True,
            )
    finally:
        book.close()
    return tuple(cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    backends = parser.parse_args().backend or BACKENDS
    missing = [name for name in backends if importlib.util.find_spec(name) is None]
    if missing:
        unavailable(f"{' and '.join(missing)} not installed")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # nothing remembered from other versions of the code
        rows = tuple(
            Errors(
                estimate=f"{backend} = peak on a CPU",
                truth="growth of the trainer's resident memory over its idle start",
                bar=BAR,
                cases=cases,
            )
            for backend in backends
            if (cases := compared(backend))
        )
    if not rows:
        unavailable("no runs are stored: python tests/accuracy/cpu.py makes them")
    if tuple(backends) != BACKENDS:
        print("\n".join(" | ".join(row.cells()) for row in rows))
        return
    part = Part(name="cpu-exact", command="python tests/accuracy/cpu_exact.py", rows=rows)
    write(part, packages=BACKENDS)


if __name__ == "__main__":
    main()
