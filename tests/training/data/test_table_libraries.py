"""What the libraries that read tables take of the host, beside their price: each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from memconsole.memory.state.data import TABLE_LIBRARIES_BYTES

PROGRAM = """
import importlib
import sys
from pathlib import Path
import psutil
from memconsole.plan.plan import DataChoice
from memconsole_trainer.data.sources.opening import open_path
from memconsole_trainer.data.text.rows.rows import load_grain

importlib.import_module(sys.argv[1])
load_grain()
process = psutil.Process()
before = process.memory_info().rss
open_path(Path(sys.argv[2]), "text", 300, DataChoice()).read(0, 1)
print(process.memory_info().rss - before)
"""
TEXTS = [f"text number {number}" for number in range(1000)]


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".json", ".jsonl"])
def test_libraries_of_tables_take_what_the_estimate_adds(
    backend: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"table{suffix}"
    rows = [{"text": text} for text in TEXTS]
    if suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == ".csv":
        path.write_text("\n".join(["text", *TEXTS]))
    else:
        lines = map(json.dumps, rows)
        path.write_text("\n".join(lines) if suffix == ".jsonl" else json.dumps(rows))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, backend, path], capture_output=True, text=True, check=True
    )
    expected = 0 if suffix == ".jsonl" else TABLE_LIBRARIES_BYTES
    assert abs(int(done.stdout) - expected) < 20 << 20, f"{int(done.stdout) >> 20} MiB"
