"""Real runs of the systems that read no text, on this machine's CPU: peak and host memory, estimated against measured.

    python tests/accuracy/systems.py [--only PRESET] [--backend torch|jax] [--print] [--write]

The data are made first. Each preset trains three times in one state folder: JAX compiles the first time, and finds
its programs on disk after that. ``--write`` puts into the coefficients file what these runs hold less than those of
text beside tensors, and what XLA's compiler leaves in the first run.
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.cli.plans.exact import wait_for_exact
from memconsole.devices.budget import budget
from memconsole.memory.estimate import table_of
from memconsole.memory.table import MemoryTable
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.plan.catalog import preset
from memconsole.plan.plan import apply_settings
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventreader import EventReader
from tests.accuracy.cpu_fit import COEFFICIENTS
from tests.accuracy.results import MIB, Bar, Case, Errors, Part, stored, write

BAR = Bar(within=0.15)
DATA = {"lqr": ("lqr", "lqr.h5", "100k"), "efficientids": ("ratings", "ratings", "100k")}
"""By preset: kind, file and size of its data."""
SETTINGS = ("device.name=cpu", "train.max_steps=100")
RUNS, SECONDS = 3, 240.0
"""Runs of each preset; the most that a tracer is waited for."""
GROWN = "growth of the trainer's resident memory over its idle start"
RESIDENT = "peak resident memory of the trainer's process tree"


class Outcome(NamedTuple):
    """A preset in one backend."""

    words: str
    formula: MemoryTable
    exact: MemoryTable
    measured: tuple[dict[str, int], ...]
    """By run: what `report --json` says of memory."""
    idle: tuple[int, ...]
    """By run: what the host held beside tensors while it trained."""

    @property
    def priced_idle(self) -> int:
        """What is estimated of it, for a run that compiles."""
        return self.formula.host.training - self.formula.peak_bytes

    def peaks(self, table: MemoryTable) -> list[Case]:
        return self._cases("peak_bytes", [table.peak_bytes] * RUNS)

    @property
    def hosts(self) -> list[Case]:
        host = self.exact.host
        return self._cases("host_bytes", [host.peak] + [host.compiled().peak] * (RUNS - 1))

    def _cases(self, name: str, estimated: list[int]) -> list[Case]:
        return [
            Case(plan=f"{self.words}, run {n}", estimated_bytes=size, measured_bytes=found[name])
            for n, (size, found) in enumerate(zip(estimated, self.measured, strict=True), start=1)
        ]


def idle_bytes(state: Path) -> int:
    """What the newest run in a state folder held beside tensors while it trained, in the middle of its records."""
    run = max((state / "memconsole" / "runs").iterdir())
    beside = [
        record.host_bytes - (record.allocated_bytes or 0)
        for record in EventReader(run / "attempts" / "0001").read()
        if isinstance(record, events.Memory) and record.phase == "train"
    ]
    return int(statistics.median(beside))


def outcome(name: str, backend: str, folder: Path) -> Outcome:
    """Train a preset with the data in `folder`, and price it."""
    words = [f"backend={backend}", *SETTINGS]
    chosen = [part for setting in words for part in ("--set", setting)]
    command = [sys.executable, "-m", "memconsole", "train", "--json", "--force"]
    found, idle = [], []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as state:
        environment = {**os.environ, "XDG_STATE_HOME": state, "XDG_CACHE_HOME": state}
        for _ in range(RUNS):
            done = subprocess.run(
                [*command, "--preset", name, *chosen],
                cwd=folder, env=environment, capture_output=True, text=True, check=True,
            )  # fmt: skip
            found.append(json.loads(done.stdout)["memory"])
            idle.append(idle_bytes(Path(state)))
    plan = apply_settings(preset(name), words)
    device, book = budget(plan, None), ExactBook()
    try:
        problem = wait_for_exact(book, plan, device, SECONDS)
        if problem:
            sys.exit(f"{name} {backend}: {problem}")
        exact = table_of(plan, device, book.lookup)
    finally:
        book.close()
    measured = tuple(memory["measured"] for memory in found)
    one = Outcome(f"{name} {backend}", table_of(plan, device), exact, measured, tuple(idle))
    for memory in found:
        phases = memory["by_phase"].items()
        print(f"{one.words:20}", *(f"{phase} {size / MIB:.1f}" for phase, size in phases))
    for kind, cases in (
        ("~", one.peaks(one.formula)), ("=", one.peaks(exact)), ("host", one.hosts),
    ):  # fmt: skip
        told = ", ".join(
            f"{c.measured_bytes / MIB:.1f} for {c.estimated_bytes / MIB:.1f} ({c.error:+.1%})"
            for c in cases
        )
        print(f"{one.words:20} {kind:4} {told}", flush=True)
    return one


def fit(backend: str, outcomes: list[Outcome]) -> None:
    """Put into the coefficients file what runs in JAX held more than estimated; what first runs held less beside
    tensors; and what later runs held less than those, if the backend compiles."""
    document = json.loads(COEFFICIENTS.read_text())
    costs = document["runtime"][backend]["cpu"]
    if backend == "jax":
        beyond = (
            one.measured_bytes - one.estimated_bytes for o in outcomes for one in o.peaks(o.exact)
        )
        costs["library_bytes"] = costs.get("library_bytes", 0) + int(statistics.median(beyond))
    costs["text_bytes"] += int(statistics.mean(o.priced_idle - o.idle[0] for o in outcomes))
    if costs.get("compiling_bytes"):
        less = (o.idle[0] - statistics.median(o.idle[1:]) for o in outcomes)
        costs["compiler_code_bytes"] = int(statistics.mean(less))
    COEFFICIENTS.write_text(json.dumps(document, indent=1) + "\n")
    for name in ("library_bytes", "text_bytes", "compiler_code_bytes"):
        print(f"{backend}: {name} {costs.get(name, 0) / MIB:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=tuple(DATA))
    parser.add_argument("--backend", action="append", choices=("torch", "jax"))
    parser.add_argument("--print", action="store_true", help="write no results")
    parser.add_argument("--write", action="store_true", help="fit the coefficients, too")
    options = parser.parse_args()
    backends = options.backend or ["torch", "jax"]
    rows: list[Errors] = []
    with tempfile.TemporaryDirectory() as data:
        os.chdir(data)  # the presets look for their data here
        for name in options.only or DATA:
            made = [sys.executable, "-m", "memconsole", "data", "make", *DATA[name][:2], "--size"]
            subprocess.run([*made, DATA[name][2]], check=True, capture_output=True)
        for backend in backends:
            found = [outcome(name, backend, Path(data)) for name in options.only or DATA]
            if options.write:
                fit(backend, found)
            for estimate, truth, cases in (
                ("~ peak", GROWN, [c for o in found for c in o.peaks(o.formula)]),
                ("= peak", GROWN, [c for o in found for c in o.peaks(o.exact)]),
                ("host bytes", RESIDENT, [c for o in found for c in o.hosts]),
            ):
                words = f"{backend} {estimate} of lqr and efficientids"
                rows.append(Errors(estimate=words, truth=truth, bar=BAR, cases=tuple(cases)))
        os.chdir(ROOT)
    if options.print or options.only:
        print("\n".join(" | ".join(row.cells()) for row in rows))
        return
    # the other backend's rows stay as they were
    kept = [row for old in stored() if old.name == "systems" for row in old.rows]
    rows += [row for row in kept if row.estimate.split()[0] not in backends]
    part = Part(name="systems", command="python tests/accuracy/systems.py", rows=tuple(rows))
    write(part, packages=("torch", "jax"))


if __name__ == "__main__":
    main()
