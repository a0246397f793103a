"""A model of 7 billion parameters on a card of 16 GB: this project's estimate beside a published table.

    python tests/accuracy/seven_billion.py [--write]

``--write`` puts the tables into docs/hybrid.md. The published figures are those of tzervas/hybrid-predict-trainer-rs,
docs/MEMORY_OPTIMIZATION_COMPLETE.md ("Memory Breakdown (7B Model Example)"), in GB.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.devices.budget import budget
from memconsole.memory.answers.solve import fit
from memconsole.memory.estimate import table_of
from memconsole.memory.table import SNAPSHOTS, MemoryTable
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.units import format_bytes, format_count, value_word

PAGE = ROOT / "docs" / "hybrid.md"
BEGIN, END = "<!-- seven-billion -->", "<!-- /seven-billion -->"
PLAIN = replace(
    Plan(),
    {
        "model.name": "llama-2-7b",
        "device.name": "rtx-5080-16gb",
        "data.sequence_length": 512,
        "train.batch_size": 8,
    },
)
ALL = replace(
    PLAIN,
    {
        "train.batch_size": 2,
        "optimize.accumulation_steps": 4,
        "optimize.precision": "bf16",
        "hybrid.mode": "aggressive",
        "hybrid.memory": "pinned",
        "hybrid.predict_precision": "bf16",
    },
)
"""What the document combines: mixed precision, accumulation, pinned offload in predict phases."""
HELPED = {"optimize.gradient_checkpointing": "full", "optimize.fused_loss": True}
"""What this project can add without changing the result."""
ROWS = (
    ("weights", "28", "14", "7"),
    ("gradients", "28", "", "0"),
    ("optimizer state", "56", "", "0"),
    ("activations", "12", "3", "0"),
)
"""A component, then the document's figures: without optimizations, in a full and in a predict phase with all."""


def table(plan: Plan) -> MemoryTable:
    return table_of(plan, budget(plan, None))


def at(found: MemoryTable, component: str, phase: str) -> str:
    size = next((c.at(phase) for c in found.components if c.name == component), 0)
    return format_bytes(size) if size else "0"


def largest_of_step(found: MemoryTable, component: str) -> str:
    sizes = (c.at(p) for c in found.components if c.name == component for p in found.step_phases)
    return format_bytes(max(sizes, default=0))


def lines() -> list[str]:
    """The tables of the page."""
    plain, full = table(PLAIN), table(ALL)
    head = (
        "| Llama 2 7B | published, plain | estimate, plain | published, Full | estimate, full | "
        "published, Predict | estimate, predict |"
    )
    found = [head, "| --- |" + " ---: |" * 6]
    for name, before, document, predicted in ROWS:
        found.append(
            f"| {name} | {before} GB | {largest_of_step(plain, name)} | {document and document + ' GB'} | "
            f"{at(full, name, 'full')} | {predicted} GB | {at(full, name, 'predict')} |"
        )
    found.append(
        f"| path of a jump | | | | {at(full, SNAPSHOTS, 'full')} | | {at(full, SNAPSHOTS, 'predict')} |"
    )
    found.append(
        f"| **whole phase** | 124 GB | {format_bytes(plain.peak_bytes)} | 14 GB | "
        f"{format_bytes(full.phases['full'])} | 7 GB | {format_bytes(full.phases['predict'])} |"
    )
    found += [
        "",
        f"Usable on the card: {format_bytes(full.budget.usable_bytes)}. "
        f"Host memory of the hybrid run: {format_bytes(full.host_bytes)}.",
        "",
        *_what_fits(),
    ]
    return found


def _what_fits() -> list[str]:
    """What the solver finds for this card, and the largest model that it trains with jumps."""
    solved = fit(replace(PLAIN, {"train.batch_size": 2, "optimize.accumulation_steps": 4}), budget(PLAIN, None))  # fmt: skip
    changes = ", ".join(f"{c.label} {value_word(c.after)}" for c in solved.changes)
    words = f"needs {format_bytes(solved.after.device_bytes)}"
    said = [
        f"- **What trains a 7B model on this card** ({'fits' if solved.fits else 'does not fit'}, {words}): {changes}. "
        f"It changes the result: {', '.join(solved.result_changes)}."
    ]
    name, most = _largest()
    said.append(
        f"- **The largest model of the catalog that trains with jumps on this card**: {name} "
        f"({format_count(catalog.models()[name].parameters or 0)} parameters), with the settings of the table, "
        f"gradient checkpointing and a chunked loss. Full: {format_bytes(most.phases['full'])}, "
        f"predict: {format_bytes(most.phases['predict'])}."
    )
    return said


def _largest() -> tuple[str, MemoryTable]:
    best: tuple[int, str, MemoryTable] | None = None
    for name, entry in catalog.models().items():
        try:
            found = table(replace(ALL, {**HELPED, "model.name": name}))
        except PlanError:
            continue
        size = entry.parameters or 0
        if found.fits and (best is None or size > best[0]):
            best = size, name, found
    assert best is not None
    return best[1], best[2]


def written(page: str) -> str:
    """The page with these tables."""
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return page[:start] + "\n" + "\n".join(lines()) + "\n" + page[end:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/hybrid.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print("\n".join(lines()))


if __name__ == "__main__":
    main()
