"""Speed and memory of the window loader, on a small file and on one many times larger.

    python tests/bench/window_reading.py [--copies 100] [--folder DIR]

The large file repeats the compressed chunks of the small one. Beside the loader: h5py reading the
same rows in order, and random rows as the original trainer of these files reads them, a sorted set
of 256 at a time, from chunks of 10,000 rows compressed with gzip. Each is measured in a process of
its own, the file's pages dropped from memory before. Results go to results/window_reading.json and
into docs/systems.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.trained import into_page, machine, markdown

RESULTS = Path(__file__).with_name("results") / "window_reading.json"
PAGE = ROOT / "docs" / "systems.md"
WINDOWS, BATCH, SHUFFLE = 100_000, 256, 10_000
ORIGINAL_CHUNK = 10_000
MEASURED = 40_000
"""Rows of a measurement of time. With the batches of `FULL_BATCHES` it stays within the first epoch
of the small file."""
RANDOM_BATCHES = 3
FULL_BATCHES = 100
"""Batches taken one by one from a full queue, while memory is watched: three shuffle buffers."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}
"""Freed arrays go back to the system at once, so that memory is what is held."""
LEAST_SHARE, LEAST_TIMES, MOST_GROWTH = 0.5, 50.0, 5 << 20
"""Bars: of h5py's speed in order, against random rows, and of growth of memory."""


def small_file(path: Path) -> None:
    words = ["data", "make", "lqr", str(path), "--size", str(WINDOWS), "--force"]
    subprocess.run([sys.executable, "-m", "memconsole", *words], check=True, stdout=sys.stderr)


def large_file(small: Path, large: Path, copies: int) -> None:
    """Write whole chunks of `small` again and again, as they are compressed. What is no array of
    rows is copied once."""
    import h5py

    with h5py.File(small) as source, h5py.File(large, "w", libver="latest") as file:
        file.attrs.update(source.attrs)
        for name, item in source.items():
            if isinstance(item, h5py.Group):
                source.copy(item, file)
                continue
            whole = item.shape[0] // item.chunks[0]
            rows = whole * item.chunks[0]
            chunks = [
                item.id.read_direct_chunk((i * item.chunks[0], *[0] * (item.ndim - 1)))
                for i in range(whole)
            ]
            options = {
                "compression": item.compression,
                "shuffle": item.shuffle,
                "fletcher32": item.fletcher32,
            }
            made = file.create_dataset(
                name, (rows * copies, *item.shape[1:]), item.dtype, chunks=item.chunks, **options
            )
            for number in range(whole * copies):
                mask, data = chunks[number % whole]
                at = (number * item.chunks[0], *[0] * (item.ndim - 1))
                made.id.write_direct_chunk(at, data, mask)


def original_file(small: Path, path: Path) -> None:
    """The same windows in the original's chunks."""
    import h5py

    with h5py.File(small) as source, h5py.File(path, "w") as file:
        for name in ("input_sequences", "controls", "control_masks"):
            values = source[name][:]
            chunks = (ORIGINAL_CHUNK, *values.shape[1:])
            file.create_dataset(name, data=values, chunks=chunks, compression=4)


def read_loader(path: Path, tick: Callable[[], None]) -> float:
    """Seconds per row of the trainer's own batches, the set-up not counted."""
    from memconsole.plan import catalog
    from memconsole.plan.plan import Plan, replace
    from memconsole_trainer.data.stream import BatchShape, BatchStream
    from memconsole_trainer.tasks.regression import open_data

    settings = {
        "model.name": "lqr",
        "data.source": str(path),
        "data.sequence_length": 32,
        "data.shuffle_buffer": SHUFFLE,
        "data.validation_fraction": 0.1,  # both files have as many held-out rows as are kept
        "train.batch_size": BATCH,
    }
    plan = replace(Plan(), settings)
    data = open_data(plan, catalog.model(plan), path.parent, _Silent(), {})
    gc.collect()
    stream = BatchStream(data.rows(), BatchShape(1, BATCH, 32))
    try:
        stream.fill()
        rows, started = 0, time.perf_counter()
        while rows < MEASURED:
            item = stream.next()
            rows += item.units
        seconds = (time.perf_counter() - started) / rows
        for _ in range(FULL_BATCHES):  # the most that is ever held: a full queue, and two buffers
            stream.next()
            while not stream._queue.full():
                time.sleep(0.001)
                tick()
            tick()
        return seconds
    finally:
        stream.close()


def read_in_order(path: Path, tick: Callable[[], None]) -> float:
    """Seconds per row of h5py, reading the three arrays chunk after chunk."""
    import h5py

    names = "input_sequences", "controls", "control_masks"
    with h5py.File(path) as file:
        chunk, started = file[names[0]].chunks[0], time.perf_counter()
        for start in range(0, MEASURED, chunk):
            for name in names:
                file[name][start : start + chunk]
            tick()
    return (time.perf_counter() - started) / (-(-MEASURED // chunk) * chunk)


def read_random_rows(path: Path, tick: Callable[[], None]) -> float:
    """Seconds per row of sorted random rows, a batch at a time."""
    import h5py
    import numpy as np

    draw = np.random.default_rng(42)
    with h5py.File(path) as file:
        order = draw.permutation(len(file["controls"]))
        started = time.perf_counter()
        for batch in range(RANDOM_BATCHES):
            wanted = np.sort(order[batch * BATCH : (batch + 1) * BATCH])
            for name in ("input_sequences", "controls", "control_masks"):
                file[name][wanted]
            tick()
    return (time.perf_counter() - started) / (RANDOM_BATCHES * BATCH)


READERS = {"loader": read_loader, "in order": read_in_order, "random rows": read_random_rows}


class _Silent:
    def phase(self, phase: str, detail: str = "") -> None: ...
    def warning(self, message: str) -> None: ...
    def tick(self) -> None: ...
    def wait_while_paused(self) -> None: ...


def one(reader: str, path: Path) -> dict[str, float]:
    """Measure one reader in this process: seconds per row, and peak anonymous memory."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    peak = 0

    def tick() -> None:
        nonlocal peak
        lines = Path("/proc/self/status").read_text().splitlines()
        anonymous = next(line for line in lines if line.startswith("RssAnon"))
        peak = max(peak, int(anonymous.split()[1]) << 10)

    seconds = READERS[reader](path, tick)
    return {"row_seconds": seconds, "anonymous_bytes": peak}


def measured(folder: Path, copies: int) -> dict[str, Any]:
    small, large, original = (folder / f"{name}.h5" for name in ("small", "large", "original"))
    small_file(small)
    original_file(small, original)
    large_file(small, large, copies)
    found: dict[str, Any] = {}
    for name, reader, path in (
        ("small", "loader", small),
        ("large", "loader", large),
        ("in order", "in order", large),
        ("random rows", "random rows", original),
    ):
        argv = [sys.executable, __file__, "--one", reader, str(path)]
        environment = os.environ | ENVIRONMENT
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found[name] = json.loads(done.stdout) | {"file_bytes": path.stat().st_size}
        print(name, found[name], file=sys.stderr)
    return found


def figures(results: dict[str, Any]) -> dict[str, float]:
    """What the bars are about."""
    large = results["large"]["row_seconds"]
    return {
        "growth_bytes": results["large"]["anonymous_bytes"] - results["small"]["anonymous_bytes"],
        "time_ratio": large / results["small"]["row_seconds"],
        "share_of_h5py": results["in order"]["row_seconds"] / large,
        "times_random_rows": results["random rows"]["row_seconds"] / large,
    }


def table(results: dict[str, Any]) -> str:
    labels = {
        "small": "loader, small file",
        "large": "loader, large file",
        "in order": "h5py in order, large file",
        "random rows": "random rows, the original's layout",
    }
    rows = [["reader", "file", "microseconds per window", "anonymous memory"]]
    for name, label in labels.items():
        found = results[name]
        rows.append(
            [
                label,
                f"{found['file_bytes'] / 2**20:,.0f} MiB",
                f"{found['row_seconds'] * 1e6:,.1f}",
                f"{found['anonymous_bytes'] / 2**20:.1f} MiB",
            ]
        )
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("READER", "FILE"))
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one[0], Path(given.one[1]))))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        results = measured(Path(folder), given.copies)
    command = "python tests/bench/window_reading.py"
    document = {"results": results, "copies": given.copies, "command": command, **machine()}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    into_page(PAGE, "window-reading", table(results))
    print(table(results))
    print(json.dumps(figures(results), indent=1))


if __name__ == "__main__":
    main()
