"""Estimates in docs/ beside figures that were measured in single runs.

    python tests/pages/estimates.py [--write]

``--write`` puts them into their pages. The processor is one of no particular size.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.memory.table import MemoryTable
from memconsole.plan.catalog import preset
from memconsole.plan.plan import replace
from tests.accuracy.platforms import mib, table
from tests.accuracy.results import MIB
from tests.bench.trained import into_page, markdown

DOCS = ROOT / "docs"
FILE_BYTES = 10**9
"""The file of `data make text --size 1g`."""
STEP = {"train.batch_size": 32, "device.name": "cpu"}
HALF = {"optimize.precision": "bf16"}
EIGHT = {**HALF, "optimize.optimizer": "adamw-8bit"}
LEAST = {
    "optimize.precision": "bf16-sr",
    "optimize.optimizer": "adamw8-all",
    "optimize.gradient_checkpointing": "full",
    "optimize.fused_loss": True,
    "train.batch_size": 1,
    "optimize.accumulation_steps": 32,
}
STORIES: tuple[tuple[str, str, Mapping[str, Any], int, int], ...] = (
    ("original: `data.streaming=false`", "1,036 MB", {"data.streaming": False}, 182, 1003),
    ("streaming", "12 MB", {}, 187, 540),
    ("mixed precision: `optimize.precision=bf16`", "6 MB", HALF, 138, 496),
    ("8-bit: `optimize.optimizer=adamw-8bit`", "2.5 MB", EIGHT, 133, 492),
    ("the same in JAX: `backend=jax`", "2.5 MB", {**EIGHT, "backend": "jax"}, 169, 536),
    ("the least here", "not in it", LEAST, 29, 392),
)
"""By row, the document's figure, settings, and what a run of three steps measured, in MiB: allocated, and the process."""
MEMORY_TEST = {"torch": 759, "jax": 651}
"""MiB that a run of `gearhead-memory` measured."""
HEAPS = (
    ("torch", "fast"),
    ("torch", "jemalloc"),
    ("jax", "fast"),
    ("jax", "tight"),
    ("jax", "jemalloc"),
)
HELD = {
    "warmup": ("137", "109", "113", "100", "106"),
    "full": ("166", "138", "134", "117", "124"),
    "predict": ("63", "58", "50", "45", "47"),
    "restore": ("75", "68", "55", "52", "53"),
    "correct": ("135", "135", "134", "118", "122"),
}
"""MiB that runs of the preset `hybrid` of 240 steps held by phase, with each of `HEAPS`."""
SHORT = {"device.name": "cpu", "train.max_steps": 240}
AGGRESSIVE = {
    "device.name": "cpu",
    "train.max_steps": 130,
    "hybrid.mode": "aggressive",
    "hybrid.memory": "cpu",
}
AGGRESSIVE_HELD = {"warmup": 167, "full": 138, "predict": 66, "restore": 73, "correct": 136}


def memory_test() -> str:
    """The step of `gearhead-memory`."""
    found = [table(replace(preset("gearhead-memory"), {"backend": b})) for b in MEMORY_TEST]
    return markdown(
        [
            ["on this CPU, MiB", "torch", "JAX"],
            ["peak of the step: estimated", *(mib(one.peak_bytes) for one in found)],
            ["peak of the step: measured", *(str(one) for one in MEMORY_TEST.values())],
            ["of the estimate, AdamW's moments", *(_at(one, "optimizer state") for one in found)],
        ]
    )


def stories() -> str:
    """A step of `stories`, beside the document's table."""
    head = "each row adds", "document", "weights", "optimizer state", "activations"
    rows = [[*head, "allocated: estimated", "measured", "whole process: estimated", "measured"]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stories.txt"
        with file.open("w", encoding="utf-8") as text:
            text.write("Once upon a time.\n")
            text.truncate(FILE_BYTES)
        for name, document, settings, allocated, process in STORIES:
            changes = {**STEP, "data.source": str(file), **settings}
            found = table(replace(preset("stories"), changes))
            parts = (_at(found, part) for part in ("weights", "optimizer state", "activations"))
            whole = mib(found.host_bytes or 0)
            row = [name, document, *parts, mib(found.peak_bytes), str(allocated), whole]
            rows.append([*row, f"{process:,}"])
    return markdown(rows)


def hybrid() -> str:
    """The phases of the preset `hybrid`."""
    rows, found = [["phase"]], []
    for backend, heap in HEAPS:
        found.append(
            table(replace(preset("hybrid"), {**SHORT, "backend": backend, "optimize.heap": heap}))
        )
        name = f"{backend.replace('jax', 'JAX')}{'' if heap == 'fast' else f', `{heap}`'}"
        rows[0] += [f"{name}: estimate", "held"]
    for phase, held in HELD.items():
        rows.append([phase])
        for one, measured in zip(found, held, strict=True):
            rows[-1] += [mib(one.phases[phase]), measured]
    other = table(replace(preset("hybrid"), AGGRESSIVE)).phases
    said = ", ".join(
        f"{held} MiB in {phase} ({mib(other[phase])} estimated)"
        for phase, held in AGGRESSIVE_HELD.items()
    )
    return (
        f"{markdown(rows)}\n\nWith `hybrid.mode=aggressive` and `hybrid.memory=cpu`, 130 steps in torch held "
        f"{said}."
    )


def _at(found: MemoryTable, name: str) -> str:
    """MiB of a component at the peak."""
    size = sum(c.at(found.peak_phase) for c in found.components if c.name == name) / MIB
    return f"{size:.1f}" if 0 < size < 10 else f"{size:,.0f}"


SECTIONS: dict[tuple[str, str], Callable[[], str]] = {
    ("systems.md", "memory-test"): memory_test,
    ("systems.md", "stories-memory"): stories,
    ("hybrid.md", "hybrid-run"): hybrid,
}
"""By page and marker."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put them into docs/")
    write = parser.parse_args().write
    for (page, name), make in SECTIONS.items():
        print(make(), end="\n\n")
        if write:
            into_page(DOCS / page, name, make())


if __name__ == "__main__":
    main()
