"""Every file that a person or a run names is opened by `memconsole.regular_file`."""

from __future__ import annotations

import re
from pathlib import Path

import memconsole

ROOT = Path(memconsole.__file__).parents[1]
READING = re.compile(r"\.read_bytes\(|\.read_text\(|(?<![\w.])(?<!def )open\((?![^\n]*\"[xw]b?\")")
OF_THE_SYSTEM = {
    "memconsole/available_memory.py", "memconsole/devices/amd.py", "memconsole/devices/tpu.py",
    "memconsole/plan/machine/processor.py", "memconsole/runs/act/family.py",
    "memconsole/runs/record/processes/identity.py", "memconsole/runs/record/failures/oom.py",
    "backends/memconsole_trainer/host/memory_limit.py", "backends/memconsole_trainer/host/host_memory.py",
    "backends/memconsole_trainer/host/heap.py",
}  # fmt: skip
"""They read what the kernel tells under /proc and /sys."""
OF_PACKAGES = {
    "memconsole/devices/frameworks.py", "memconsole/memory/activations/block_programs.py",
    "memconsole/memory/coefficients.py",
    "memconsole/memory/tracers/store.py", "memconsole/plan/catalog/tables.py",
    "memconsole/web/server.py", "backends/memconsole_jax/tracing/trace_targets.py",
}  # fmt: skip
"""They read files that were installed."""
STANDALONE = {
    f"backends/memconsole_trainer/predictions/standalone/{task}.py"
    for task in ("recommendation", "regression")
}
"""They run beside the files that they read, without this program."""


def test_files_that_are_named_are_opened_in_one_way() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in ("memconsole", "backends")
        for path in (ROOT / package).rglob("*.py")
        if READING.search(path.read_text())
    }
    assert found == OF_THE_SYSTEM | OF_PACKAGES | STANDALONE
