"""Real hybrid runs of both trainers on this machine's CPU: the peak of each phase, estimated against measured.

    python tests/accuracy/hybrid.py [--backend torch|jax] [--print]
    python tests/accuracy/hybrid.py --stored    measures nothing, puts what is stored into docs/hybrid.md
    python tests/accuracy/hybrid.py --others    runs other plans, and stores nothing
    python tests/accuracy/hybrid.py --heap      fits the share that torch's heap keeps to the other plans

Rates are low, jumps short and batches large enough to confirm them, so that jumps are kept: the weights before a kept
jump take memory, too. A run that keeps none is an error. The phases go into docs/hybrid.md, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.devices.budget import budget
from memconsole.memory import hybrid
from memconsole.memory.estimate import table_of
from memconsole.plan.plan import Plan, apply_settings, replace
from memconsole.plan.sections.hybrid import PHASES
from memconsole.runs.read.report.comparison import measured_phases
from tests.accuracy.cpu import run
from tests.accuracy.cpu_fit import COEFFICIENTS
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
    "train.batch_size": "16",
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


OTHERS = tuple(
    {"hybrid.warmup_steps": "12", "train.max_steps": "32", **one}
    for one in (
        {
            "hybrid.memory": "compress",
            "model.target_params": "1000000",
            "data.vocab_size": "2048",
            "data.sequence_length": "128",
            "train.batch_size": "32",
        },
        {
            "hybrid.memory": "compress",
            "model.target_params": "3000000",
            "data.sequence_length": "256",
        },
        {"hybrid.memory": "compress", "optimize.precision": "bf16", "data.sequence_length": "128"},
        {
            "hybrid.memory": "none",
            "hybrid.predict_precision": "fp32",
            "model.target_params": "3000000",
            "data.vocab_size": "4096",
            "data.sequence_length": "128",
            "train.batch_size": "8",
            "optimize.accumulation_steps": "2",
        },
        {
            "hybrid.memory": "reinitialize",
            "data.sequence_length": "100",
            "optimize.gradient_checkpointing": "full",
        },
        {
            "hybrid.memory": "compress",
            "model.weights": "random",
            "optimize.lora_rank": "32",
            "optimize.freeze_base": "true",
            "data.sequence_length": "128",
        },
    )
)


def words_of(varied: Mapping[str, str]) -> str:
    """How results name a plan."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in varied.items())


def plan_of(backend: str, varied: Mapping[str, str]) -> Plan:
    wanted = {"backend": backend, **FIXED, **varied}
    return apply_settings(Plan(), [f"{key}={value}" for key, value in wanted.items()])


def cases(
    backend: str, plans: Sequence[Mapping[str, str]] = VARIED, *, confirmed: bool = True
) -> list[Case]:
    """The phases of each run. Ends the program if a run kept no jump although its jumps should be `confirmed`."""
    found = []
    for varied in plans:
        words, plan = words_of(varied), plan_of(backend, varied)
        report = run({"backend": backend, **FIXED, **varied})
        table, seen = table_of(plan, budget(plan, None)), report["memory"]["by_phase"]
        told = measured_phases((*seen, *table.phases))
        kept = report["jumps"]["kept"] if report["jumps"] else 0
        if confirmed and not kept:
            sys.exit(
                f"{backend}, {words}: no jump was kept, so no memory of a kept jump was measured"
            )
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


def fit_heap() -> None:
    """Put the share of its usual bytes that torch's heap keeps in warmup and full phases into the coefficients file: the
    median of these phases of the other plans."""
    measured = {one.plan: one.measured_bytes for one in cases("torch", OTHERS, confirmed=False)}
    shares = []
    for varied in OTHERS:
        fast = plan_of("torch", varied)
        tight = replace(fast, {"optimize.heap": "tight"})  # keeps nothing
        usual = _most_of_a_step(hybrid.plain(fast)) - _most_of_a_step(hybrid.plain(tight))
        without = table_of(tight, budget(tight, None)).phases
        for phase in ("warmup", "full"):
            shares.append((measured[f"{phase} {words_of(varied)}"] - without[phase]) / usual)
    document = json.loads(COEFFICIENTS.read_text())
    share = round(statistics.median(shares), 2)
    document["runtime"]["torch"]["cpu"]["heaps"]["fast"]["trimmed"] = share
    COEFFICIENTS.write_text(json.dumps(document, indent=1) + "\n")
    print(f"the heap keeps {share} ({', '.join(f'{one:.2f}' for one in shares)})")


def _most_of_a_step(plan: Plan) -> int:
    table = table_of(plan, budget(plan, None))
    return max(table.phases[phase] for phase in table.step_phases)


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
    parser.add_argument("--others", action="store_true", help="run other plans, write no results")
    parser.add_argument("--heap", action="store_true", help="fit what the heap keeps")
    options = parser.parse_args()
    if options.heap:
        fit_heap()
        return
    if options.stored:
        into_page(PAGE, "hybrid-phases", section(rows_stored()))
        return
    backends = options.backend or ["torch", "jax"]
    rows = [
        Errors(
            estimate=f"{backend} ~ phases of hybrid runs on a CPU",
            truth="growth of the trainer's resident memory in each phase",
            bar=BAR,
            cases=tuple(
                cases(backend, OTHERS, confirmed=False) if options.others else cases(backend)
            ),
        )
        for backend in backends
    ]
    if options.print or options.others:
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
