"""Real hybrid runs of both trainers on this machine's CPU: the peak of each phase, estimated against measured.

    python tests/accuracy/hybrid.py [--backend torch|jax] [--print]
    python tests/accuracy/hybrid.py --stored    measures nothing, puts what is stored into docs/hybrid.md

Rates are low and jumps short, so that jumps are kept: the weights before a kept jump take memory, too. The phases go
into docs/hybrid.md, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.devices.budget import budget
from memconsole.memory.estimate import table_of
from memconsole.plan.plan import Plan, apply_settings
from memconsole.plan.sections.hybrid import PHASES
from memconsole.runs.read.report.comparison import measured_phases
from tests.accuracy.cpu import run
from tests.accuracy.results import MIB, Bar, Case, Errors, Part, stored, write
from tests.bench.trained import into_page, markdown

PAGE = ROOT / "docs" / "hybrid.md"
BAR = Bar(within=0.10)
FIXED = {
    "device.name": "cpu",
    "model.target_params": "8000000",
    "data.max_examples": "30",
    "data.vocab_size": "1024",
    "data.sequence_length": "64",
    "train.batch_size": "4",
    "train.max_steps": "24",
    "train.learning_rate": "1e-4",
    "train.schedule": "constant",
    "train.warmup_steps": "1",
    "train.evaluation_batches": "1",
    "train.sample_tokens": "4",
    "hybrid.mode": "aggressive",
    "hybrid.warmup_steps": "4",
    "hybrid.full_steps": "9",
    "hybrid.snapshot_stride": "1",
    "hybrid.horizon": "3",
    "hybrid.confidence": "0",
    "hybrid.predictor": "extrapolate",
}
VARIED = (
    {"hybrid.memory": "none"},
    {"hybrid.memory": "compress", "hybrid.predict_precision": "same"},
    {"hybrid.memory": "reinitialize", "hybrid.restore_ahead": "0"},
)


def cases(backend: str) -> list[Case]:
    """The phases of each run."""
    found = []
    for varied in VARIED:
        wanted = {"backend": backend, **FIXED, **varied}
        words = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in varied.items())
        plan = apply_settings(Plan(), [f"{key}={value}" for key, value in wanted.items()])
        report = run(wanted)
        table, seen = table_of(plan, budget(plan, None)), report["memory"]["by_phase"]
        told = measured_phases((*seen, *table.phases))
        kept = report["jumps"]["kept"] if report["jumps"] else 0
        for phase in PHASES:
            peaks = [seen[name] for name in told.get(phase, ()) if name in seen]
            if peaks and phase in table.phases:
                case = Case(
                    plan=f"{phase} {words}",
                    estimated_bytes=table.phases[phase],
                    measured_bytes=max(peaks),
                )
                found.append(case)
                print(
                    f"{backend:5} {phase:8} {case.error:+6.1%} {case.measured_bytes / MIB:7.1f} MiB  "
                    f"{words}  ({kept} jumps kept)",
                    flush=True,
                )
    return found


def rows_stored() -> list[Errors]:
    """What was measured last, by backend."""
    return [row for part in stored() if part.name == "hybrid" for row in part.rows]  # type: ignore[misc]


def section(rows: Sequence[Errors]) -> str:
    """What each phase holds in both backends, in MiB, and how far the estimates are off."""
    both = {row.estimate.split()[0]: {case.plan: case for case in row.cases} for row in rows}
    head = [
        "settings (hybrid.…)",
        "phase",
        *(f"{b}, {n}" for b in ("torch", "JAX") for n in ("estimate", "held")),
    ]
    lines, shown = [head], ""
    for plan in both["torch"]:
        phase, _, settings = plan.partition(" ")
        sizes = [
            f"{size / MIB:.0f}"
            for backend in ("torch", "jax")
            for size in (both[backend][plan].estimated_bytes, both[backend][plan].measured_bytes)
        ]
        lines.append(["" if settings == shown else settings, phase, *sizes])
        shown = settings
    errors = [case.error for row in rows for case in row.cases]
    return (
        f"{markdown(lines, left=2)}\n\n"
        f"Phases held up to {1 / (1 + min(errors)) - 1:.0%} more and {1 - 1 / (1 + max(errors)):.0%} less than estimated."
    ).replace("%", " %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=("torch", "jax"))
    parser.add_argument("--print", action="store_true", help="write no results")
    parser.add_argument("--stored", action="store_true", help="measure nothing, write the page")
    options = parser.parse_args()
    if options.stored:
        into_page(PAGE, "hybrid-phases", section(rows_stored()))
        return
    backends = options.backend or ["torch", "jax"]
    rows = [
        Errors(
            estimate=f"{backend} ~ phases of hybrid runs on a CPU",
            truth="growth of the trainer's resident memory in each phase",
            bar=BAR,
            cases=tuple(cases(backend)),
        )
        for backend in backends
    ]
    if options.print:
        print("\n".join(" | ".join(row.cells()) for row in rows))
        return
    # the other backend's row stays as it was
    rows += [row for row in rows_stored() if row.estimate.split()[0] not in backends]
    write(
        Part(name="hybrid", command="python tests/accuracy/hybrid.py", rows=tuple(rows)),
        packages=("torch", "jax"),
    )
    into_page(PAGE, "hybrid-phases", section(rows))


if __name__ == "__main__":
    main()
