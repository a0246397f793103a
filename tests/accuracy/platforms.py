"""The presets of documents that name hardware: this project's estimates beside the documents' figures.

    python tests/accuracy/platforms.py [--write]

``--write`` puts the tables into docs/systems.md. Devices are those of the catalog, and a processor of no particular size.
The documents are MEMORY_OPTIMIZATIONS.md of thINKblots/gearhead and MEMORY_OPTIMIZATION_GUIDE.md of DevAdalat/sync.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.devices.budget import budget
from memconsole.memory.estimate import table_of
from memconsole.memory.table import MemoryTable
from memconsole.plan.catalog import preset
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, replace, written
from memconsole.units import GIB, format_bytes
from tests.accuracy.results import MIB
from tests.bench.trained import into_page, markdown

PAGE = ROOT / "docs" / "systems.md"
PLATFORMS = {"nvidia": "NVIDIA RTX 3060", "amd-rocm": "AMD RX 6750 XT", "apple": "Apple M2"}
PUBLISHED = {
    "weights": ("0.5 GB", "0.5 GB", "0.5 GB"),
    "gradients": ("0.5 GB", "0.5 GB", "0.5 GB"),
    "optimizer state": ("1.0 GB", "1.0 GB", "1.0 GB"),
    "activations": ("2-3 GB", "0.6 GB", "2-3 GB"),
    "logits and loss": ("not named", "not named", "not named"),
}
"""By component, the document's figure for each platform."""
PUBLISHED_PEAK = ("4-5 GB", "2.6 GB", "4-5 GB")
WHOLE = {
    "train.batch_size": 16,
    "optimize.accumulation_steps": 2,
    "optimize.precision": "fp32",
}
"""What the document calls "~32 GB", on the preset `nvidia`."""
HARDWARE = {
    "limited-ram": "< 8 GB",
    "medium-ram": "8-16 GB",
    "high-ram": "> 16 GB",
    "tpu": "v5e, JAX",
}
SOURCE = {"data.source": "tinystories"}
"""Its size does not depend on this machine, as that of the presets' own source does."""
PROCESSOR = Budget(
    name="cpu", kind="cpu", memory_label="host RAM", total_bytes=64 * GIB, usable_bytes=64 * GIB,
    why="of no particular size", bandwidth_bytes_per_second=2e10, peak_flops={"fp32": 1e11},
)  # fmt: skip


def table(plan: Plan) -> MemoryTable:
    device = PROCESSOR if plan.device.name == "auto" else budget(plan, None)
    return table_of(plan, device)


def mib(size: int) -> str:
    return f"{size / MIB:,.0f}"


def platforms() -> str:
    """The document's three platforms, and its largest step."""
    plans = [preset(name) for name in PLATFORMS]
    tables = [table(plan) for plan in plans]
    head = [""]
    for words, plan in zip(PLATFORMS.values(), plans, strict=True):
        checkpointed = "" if plan.optimize.gradient_checkpointing == "none" else ", checkpointed"
        head.append(
            f"{words}, {plan.train.batch_size} x {plan.data.sequence_length:,}{checkpointed}"
        )
    rows = [head]
    for name, published in PUBLISHED.items():
        sizes = [
            next(c.at(found.peak_phase) for c in found.components if c.name == name)
            for found in tables
        ]
        rows.append([f"{name}: document", *published])
        rows.append([f"{name}: estimated", *map(mib, sizes)])
    rows.append(["peak: document", *PUBLISHED_PEAK])
    rows.append(["peak allocated: estimated", *(mib(found.peak_bytes) for found in tables)])
    rows.append(["on the device: estimated", *(mib(found.device_bytes) for found in tables)])
    whole = table(replace(preset("nvidia"), WHOLE))
    changed = " ".join(
        f"--set {key}={written(value).strip(chr(34))}" for key, value in WHOLE.items()
    )
    return (
        f"{markdown(rows)}\n\n"
        'The document says "~32 GB" for 16 rows of 1,024 tokens without checkpointing. '
        f"This says {format_bytes(whole.device_bytes)}:\n`memconsole plan --preset nvidia {changed}`."
    )


def hardware() -> str:
    """The four recommendations for `stories`."""
    rows = [
        [
            "preset", "precision", "optimizer", "rows in a micro-batch", "accumulated",
            "shuffle buffer", "on the device", "host",
        ]
    ]  # fmt: skip
    for name, words in HARDWARE.items():
        plan = replace(preset(name), SOURCE)
        found, o = table(plan), plan.optimize
        rows.append(
            [
                f"`{name}` ({words})", o.precision, o.optimizer, f"{plan.train.batch_size}",
                f"{o.accumulation_steps}", f"{plan.data.shuffle_buffer:,}", mib(found.device_bytes),
                mib(found.host_bytes),
            ]
        )  # fmt: skip
    return markdown(rows, left=3)


SECTIONS = {"platforms": platforms, "hardware": hardware}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/systems.md")
    write = parser.parse_args().write
    for name, make in SECTIONS.items():
        text = make()
        print(text, end="\n\n")
        if write:
            into_page(PAGE, name, text)


if __name__ == "__main__":
    main()
