"""What a run's data takes of the host, streamed or held, beside its price: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest

from memconsole.memory.state import data
from memconsole.plan.plan import Plan, replace
from memconsole.units import MIB

VOCABULARY, ROWS, WIDTH = 8192, 80_000, 257
NOISE = 10 * MIB
PROGRAM = """
import sys
import time
from pathlib import Path
import msgspec
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole_trainer.data.text.prepared import prepare
from memconsole_trainer.data.sources.opening import open_source
from memconsole_trainer.data.text.opened import alone
from memconsole_trainer.data.text.rows.batches import TextRows
from memconsole_trainer.data.stream import BatchShape, BatchStream
from memconsole_trainer.host.host_memory import HostMemory
from memconsole_trainer.data.text.rows.rows import load_grain

plan = msgspec.json.decode(sys.argv[1], type=Plan)
model = Architecture(
    family="llama", vocab_size=int(sys.argv[2]), hidden_size=8, layers=1, heads=1, kv_heads=1, head_size=8,
    intermediate_size=8, max_positions=256, tied_embeddings=True,
)
load_grain()
source = open_source(plan, model.vocab_size)
source.rows(0, 1)
memory = HostMemory()
memory.start()
data = prepare(plan, model, alone(plan, source), None, Path(sys.argv[3]) / "data.json", lambda: None)
first = data.portions[0]
shape = BatchShape(1, plan.train.batch_size, plan.data.sequence_length)
stream = BatchStream(TextRows(first.blocks, 0, plan.data.shuffle_buffer, first.held), shape)
full = stream._queue.maxsize
while stream._queue.qsize() < full:
    time.sleep(0.01)
for _ in range(20):
    stream.next()
print(memory.peak_bytes())
stream.close()
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of token rows, 41 MB as the trainer holds them."""
    path = tmp_path_factory.mktemp("data") / "rows.h5"
    values = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, WIDTH)).astype(np.uint16)
    with h5py.File(path, "w") as file:
        file.create_dataset("tokens", data=values, chunks=(64, WIDTH))
    return path


def taken(rows: Path, changes: dict[str, Any]) -> tuple[int, int]:
    """Bytes at the peak, measured and priced."""
    plan = replace(
        Plan(),
        {
            "data.source": str(rows),
            "data.sequence_length": WIDTH - 1,
            "data.validation_fraction": 0.0,
            "train.batch_size": 16,
            **changes,
        },
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, msgspec.json.encode(plan), str(VOCABULARY), rows.parent],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout), data.data_bytes(plan, VOCABULARY)


def test_a_stream_takes_its_window_and_what_is_ahead_and_held_tokens_take_all(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "dataset_tokens", lambda plan: ROWS * WIDTH)
    small, priced_small = taken(rows, {"data.shuffle_buffer": 1000})
    large, priced_large = taken(rows, {"data.shuffle_buffer": 40_000})
    held, priced_held = taken(rows, {"data.streaming": False})
    assert small < 24 * MIB  # HDF5's own, and a block as it is read
    assert priced_large - priced_small > 40 * MIB
    assert abs((large - small) - (priced_large - priced_small)) < NOISE
    assert priced_held - priced_small > 50 * MIB
    assert abs((held - small) - (priced_held - priced_small)) < NOISE
