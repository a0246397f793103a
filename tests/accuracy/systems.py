"""Real runs of the systems that read no text, on this machine's CPU: peak and host memory, estimated against measured.

    python tests/accuracy/systems.py [--only PRESET] [--backend torch|jax] [--print | --write]

The data are made first. Each preset trains three times in one state folder: JAX compiles the first time, and finds
its programs on disk after that. ``--write`` puts into the coefficients file what these runs' idle trainers hold less
than those of text, and what XLA's compiler leaves in the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.cli.plans.exact import wait_for_exact
from memconsole.devices.budget import budget
from memconsole.memory.coefficients import runtime
from memconsole.memory.estimate import table_of
from memconsole.memory.table import MemoryTable
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.plan.catalog import preset
from memconsole.plan.plan import apply_settings
from tests.accuracy.cpu_fit import COEFFICIENTS
from tests.accuracy.results import MIB, Bar, Case, Errors, Part, stored, write

BAR = Bar(within=0.15)
DATA = {"lqr": ("lqr", "lqr.h5", "100k"), "efficientids": ("ratings", "ratings", "100k")}
"""By preset: kind, file and size of its data."""
SETTINGS = ("device.name=cpu", "train.max_steps=150")
RUNS, SECONDS = 3, 240.0
"""Runs of each preset; the most that a tracer is waited for."""


class Outcome(NamedTuple):
    """A preset in one backend."""

    words: str
    formula: MemoryTable
    exact: MemoryTable
    measured: tuple[dict[str, Any], ...]
    """By run: what `report --json` says of memory."""

    def peaks(self, table: MemoryTable) -> list[Case]:
        return [
            Case(plan=f"{self.words}, run {n}", estimated_bytes=table.peak_bytes, measured_bytes=m["peak_bytes"])
            for n, m in enumerate(self.measured, start=1)
        ]  # fmt: skip

    def hosts(self, table: MemoryTable) -> list[Case]:
        later = table.host.compiled()
        return [
            Case(
                plan=f"{self.words}, run {n}",
                estimated_bytes=(table.host if n == 1 else later).peak,
                measured_bytes=m["host_bytes"],
            )
            for n, m in enumerate(self.measured, start=1)
        ]

    @property
    def idle(self) -> list[int]:
        """By run, what the host held beside tensors while it trained, less what was estimated of it."""
        beside = self.formula.host.training - self.formula.peak_bytes
        return [m["host_bytes"] - m["peak_bytes"] - beside for m in self.measured]


def outcome(name: str, backend: str, folder: Path) -> Outcome:
    """Train a preset with data in `folder`, and price it."""
    words = [f"backend={backend}", *SETTINGS]
    chosen = [part for setting in words for part in ("--set", setting)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as state:
        environment = {**os.environ, "XDG_STATE_HOME": state, "XDG_CACHE_HOME": state}
        command = [sys.executable, "-m", "memconsole", "train", "--json", "--force"]
        found = []
        for _ in range(RUNS):
            done = subprocess.run(
                [*command, "--preset", name, *chosen],
                cwd=folder, env=environment, capture_output=True, text=True, check=True,
            )  # fmt: skip
            found.append(json.loads(done.stdout)["memory"])
    plan = apply_settings(preset(name), words)
    device, book = budget(plan, None), ExactBook()
    try:
        problem = wait_for_exact(book, plan, device, SECONDS)
        if problem:
            sys.exit(f"{name} {backend}: {problem}")
        exact = table_of(plan, device, book.lookup)
    finally:
        book.close()
    one = Outcome(
        f"{name} {backend}",
        table_of(plan, device),
        exact,
        tuple({**memory["measured"], "by_phase": memory.get("by_phase")} for memory in found),
    )
    for kind, cases in (
        ("~", one.peaks(one.formula)), ("=", one.peaks(exact)), ("host", one.hosts(exact)),
    ):  # fmt: skip
        told = ", ".join(f"{c.measured_bytes / MIB:.1f} ({c.error:+.1%})" for c in cases)
        print(
            f"{one.words:20} {kind:4} {cases[-1].estimated_bytes / MIB:6.1f} MiB: {told}",
            flush=True,
        )
    return one


def fit(backend: str, outcomes: list[Outcome]) -> None:
    """Move the two coefficients by what the runs held beside tensors over what was estimated of it."""
    document = json.loads(COEFFICIENTS.read_text())
    costs = document["runtime"][backend]["cpu"]
    code = costs.get("compiler_code_bytes", 0)
    later = [code + over for one in outcomes for over in one.idle[1:]]
    moved = statistics.median(later)
    costs["text_bytes"] = int(costs["text_bytes"] - moved)
    COEFFICIENTS.write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"{backend}: text takes {costs['text_bytes'] / MIB:.1f} MiB of {runtime(backend, 'cpu').host_bytes / MIB:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=tuple(DATA))
    parser.add_argument("--backend", action="append", choices=("torch", "jax"))
    parser.add_argument("--print", action="store_true", help="write no results")
    parser.add_argument(
        "--write", action="store_true", help="fit the coefficients, write no results"
    )
    options = parser.parse_args()
    backends = options.backend or ["torch", "jax"]
    rows: list[Errors] = []
    with tempfile.TemporaryDirectory() as data:
        os.chdir(data)  # the presets look for their data here
        for name in options.only or DATA:
            kind, file, size = DATA[name]
            words = ["data", "make", kind, file, "--size", size]
            subprocess.run(
                [sys.executable, "-m", "memconsole", *words], check=True, stderr=subprocess.DEVNULL
            )
        for backend in backends:
            found = [outcome(name, backend, Path(data)) for name in options.only or DATA]
            if options.write:
                fit(backend, found)
            grown = "growth of the trainer's resident memory over its idle start"
            for estimate, truth, cases in (
                ("~ peak of lqr and efficientids", grown, [c for o in found for c in o.peaks(o.formula)]),
                ("= peak of lqr and efficientids", grown, [c for o in found for c in o.peaks(o.exact)]),
                ("host bytes of lqr and efficientids", "peak resident memory of the trainer's process tree",
                 [c for o in found for c in o.hosts(o.exact)]),
            ):  # fmt: skip
                rows.append(
                    Errors(
                        estimate=f"{backend} {estimate}", truth=truth, bar=BAR, cases=tuple(cases)
                    )
                )
    if options.write or options.print or options.only:
        print("\n".join(" | ".join(row.cells()) for row in rows))
        return
    # the other backend's rows stay as they were
    kept = [row for old in stored() if old.name == "systems" for row in old.rows]
    rows += [
        row for row in kept if isinstance(row, Errors) and row.estimate.split()[0] not in backends
    ]
    part = Part(name="systems", command="python tests/accuracy/systems.py", rows=tuple(rows))
    write(part, packages=("torch", "jax"))


if __name__ == "__main__":
    main()
