"""How long it takes to go on at a place far into the data.

    python tests/bench/resuming.py [--rows 10000000]

Each source is made so that it has more than ten million rows. `opened` is the time to open it, which a
run needs at any place; `first row` and `last row` are the times from a state of the pipeline to its next
batch, at the beginning and at the end of the epoch, with a shuffle buffer of 10,000 rows. An earlier
attempt has been at the same place, as it has where a run goes on. Results go to
results/resuming.json and into docs/data.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.trained import into_page, machine, markdown

RESULTS = Path(__file__).with_name("results") / "resuming.json"
PAGE = ROOT / "docs" / "data.md"
LENGTH, BATCH, SHUFFLE = 8, 16, 10_000
BAR = 1.0
"""Most seconds to the next batch."""


def token_rows(path: Path, rows: int) -> None:
    """A file of rows of tokens."""
    import h5py
    import numpy as np

    random, part = np.random.default_rng(0), 1 << 16
    with h5py.File(path, "w") as file:
        made = file.create_dataset(
            "tokens", (rows, LENGTH + 1), np.uint16, chunks=(4096, LENGTH + 1)
        )
        for start in range(0, rows, part):
            stop = min(start + part, rows)
            made[start:stop] = random.integers(1, 256, (stop - start, LENGTH + 1))


def records(path: Path, rows: int) -> None:
    """A file of records, each of which fills a row."""
    with path.open("wb", 1 << 20) as file:
        for start in range(0, rows, 1 << 16):
            stop = min(start + (1 << 16), rows)
            file.writelines(b'{"n": "%08d"}\n' % number for number in range(start, stop))


def text(path: Path, rows: int) -> None:
    """A text that makes at least as many rows: a token stands for few characters."""
    line = " ".join(f"{number % 89:02d}" for number in range(40)) + "\n"
    with path.open("w", 1 << 20) as file:
        for _ in range(0, rows * (LENGTH + 1) * 2, len(line)):
            file.write(line)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def measured(settings: dict[str, Any], run: Path) -> dict[str, Any]:
    """The times of one source."""
    from memconsole.plan import catalog
    from memconsole.plan.plan import Plan, replace
    from memconsole_trainer.data.stream import BatchShape, BatchStream
    from memconsole_trainer.data.text.opened import open_text
    from memconsole_trainer.data.text.portion import _blocks
    from memconsole_trainer.data.text.rows.batches import TextRows
    from memconsole_trainer.data.text.run_tokenizer import make_tokenizer

    plan = replace(
        Plan(),
        {
            "data.sequence_length": LENGTH,
            "data.validation_fraction": 0.0,
            "data.vocab_size": 300,
            "data.tokenizer_examples": 50,
            **settings,
        },
    )
    architecture = catalog.architecture(plan)
    opening, opened = seconds(lambda: open_text(plan, architecture.vocab_size))
    tokenizer = make_tokenizer(plan, architecture, opened, run / "tokenizer.json", None)
    blocks = _blocks(opened.first, architecture.vocab_size, tokenizer, frozenset(), run, print)
    assert blocks.count is not None
    rows, shape = TextRows(blocks, 1, SHUFFLE), BatchShape(1, BATCH, LENGTH)

    def at(block: int) -> dict[str, float]:
        place = {"parent": {"next": block}, "skip": 0, "fresh": 0}
        state = {"epoch": 1, "rows": {"before": place, "window": 0, "yielded": SHUFFLE // 2}}

        def resumed() -> None:
            stream = BatchStream(rows, shape, state)
            stream.next()
            stream.close()

        resumed()  # the attempt that came to this place, and kept its tokens
        time.sleep(0.5)  # its thread reads ahead of the device
        cpu = time.process_time()
        clock, _ = seconds(resumed)
        return {"clock": clock, "cpu": time.process_time() - cpu}

    each = len(blocks.several([0])[0]) / blocks.stride
    needed = min(int(2 * SHUFFLE / max(each, 1)) + 1, blocks.count - 1)
    return {
        "rows": each * blocks.count,
        "opened": opening,
        "first": at(0),
        "last": at(blocks.count - needed),
    }


def table(results: dict[str, Any]) -> str:
    rows = [["source", "rows", "opened, s", "first row, s", "of CPU", "last row, s", "of CPU"]]
    for name, one in results.items():
        times = [
            f"{one[what][kind]:.2f}" for what in ("first", "last") for kind in ("clock", "cpu")
        ]
        rows.append([name, f"{one['rows'] / 1e6:,.1f} M", f"{one['opened']:.2f}", *times])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    given = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        cases: dict[str, tuple[str, Callable[[Path, int], None], dict[str, Any]]] = {
            "rows of tokens (.h5)": ("rows.h5", token_rows, {}),
            "records (.jsonl), kept tokens": ("a.jsonl", records, {"data.template": "{{ n }}"}),
            "text, kept tokens": ("b.txt", text, {}),
            "text, tokenized again": ("c.txt", text, {"data.cache_gib": 0}),
        }
        for label, (file, write, settings) in cases.items():
            path, run = folder / file, folder / f"run-{file}"
            run.mkdir()
            write(path, given.rows)
            results[label] = measured({"data.source": str(path), **settings}, run)
            path.unlink()
            print(label, results[label], file=sys.stderr)
    document = {"results": results, "command": "python tests/bench/resuming.py", **machine()}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    into_page(PAGE, "resuming", table(results))
    print(table(results))


if __name__ == "__main__":
    main()
