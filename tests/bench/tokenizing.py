"""Speed of tokenizing while training, beside the bare library; and of tokens that were kept on disk.

    python tests/bench/tokenizing.py [--rounds 9] [--megabytes 2]

Three sources with the same text: a folder of files, a column of a table, and records of which only the
answers are learned. The library's `encode_batch` gets the texts in memory, 1,000 at a time, and its
result is thrown away. The trainer's blocks are read from their source, split, encoded, copied into
arrays and, for records, marked and packed. Both have all threads. Rounds alternate, and medians are
compared, by the time of the process (all threads) and by the clock. Results go to
results/tokenizing.json and into docs/data.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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

RESULTS = Path(__file__).with_name("results") / "tokenizing.json"
PAGE = ROOT / "docs" / "data.md"
TEMPLATE = "{{ question }}{% generation %}{{ answer }}{% endgeneration %}"
DOCUMENT_CHARACTERS = 1200
TOGETHER = 1000
BAR = 0.9
"""Least share of the bare library's tokens in the same time, for texts. Of records the places of the answers are
found besides."""


def sources(folder: Path, megabytes: int) -> dict[str, dict[str, Any]]:
    """Write the text in three forms. Returns the settings of each."""
    from memconsole.plan.machine import stdlib

    text, size = [], 0
    for path in stdlib.files():
        text.append(path.read_text("utf-8", "replace"))
        size += len(text[-1])
        if size >= megabytes << 20:
            break
    (folder / "files").mkdir()
    for number, one in enumerate(text):
        (folder / "files" / f"{number:04d}.txt").write_text(one)
    whole = "".join(text)
    step = DOCUMENT_CHARACTERS
    pieces = [whole[i : i + step] for i in range(0, len(whole), step)]
    with (folder / "table.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": piece}) + "\n" for piece in pieces)
    with (folder / "records.jsonl").open("w") as file:
        for piece in pieces:
            half = len(piece) // 2
            record = {"question": piece[:half], "answer": piece[half:]}
            file.write(json.dumps(record) + "\n")
    return {
        "files of text": {"data.source": str(folder / "files")},
        "column of a table": {"data.source": str(folder / "table.jsonl")},
        "records, answers learned": {
            "data.source": str(folder / "records.jsonl"),
            "data.template": TEMPLATE,
            "data.loss_on": "answers",
        },
    }


def timed(work: Callable[[], int]) -> tuple[float, float]:
    """Tokens of `work` in a second of the process's time, and of the clock's."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = work()
    return tokens / (time.process_time() - cpu), tokens / (time.perf_counter() - wall)


def measured(settings: dict[str, Any], rounds: int, run: Path) -> dict[str, Any]:
    """The rates of one source."""
    from memconsole.plan.plan import Plan, replace
    from memconsole_trainer.data.text.blocks.text_blocks import TextBlocks
    from memconsole_trainer.data.text.opened import open_text
    from memconsole_trainer.data.text.portion import _blocks
    from memconsole_trainer.data.text.run_tokenizer import make_tokenizer

    plan = replace(Plan(), {"data.validation_fraction": 0.0, "data.cache_gib": 0, **settings})
    from memconsole.plan import catalog

    opened = open_text(plan, 4096)
    saved = run / "tokenizer.json"
    tokenizer = make_tokenizer(plan, catalog.architecture(plan), opened, saved, None)
    assert tokenizer is not None
    source = opened.first.source
    texts = [str(t) for t in source.read(0, source.count or 0)]  # type: ignore[union-attr]

    def blocks(cache_gib: int) -> TextBlocks:
        own = replace(plan, {"data.cache_gib": cache_gib})
        part = open_text(own, 4096).first
        made = _blocks(part, 4096, tokenizer, frozenset(), run, print)
        assert isinstance(made, TextBlocks)
        return made

    def bare() -> int:
        inner, count = tokenizer._inner, 0
        for start in range(0, len(texts), TOGETHER):
            found = inner.encode_batch(texts[start : start + TOGETHER], add_special_tokens=False)
            count += sum(map(len, found))
        return count

    tokens = bare()
    fresh = blocks(0)

    def ours() -> int:
        for _ in fresh.iterate(0):
            pass
        return tokens

    kept = blocks(1)
    for _ in kept.iterate(0):
        pass

    def again() -> int:
        for _ in kept.iterate(0):
            pass
        return tokens

    rates: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": [], "kept": []}
    for _ in range(rounds):
        for name, work in (("bare", bare), ("ours", ours), ("kept", again)):
            rates[name].append(timed(work))
    found: dict[str, Any] = {"tokens": tokens}
    for place, unit in enumerate(("cpu", "clock")):
        for name, values in rates.items():
            found[f"{name}_per_{unit}_second"] = statistics.median(v[place] for v in values)
        pairs = zip(rates["ours"], rates["bare"], strict=True)
        found[f"share_by_{unit}"] = statistics.median(a[place] / b[place] for a, b in pairs)
    return found


def table(results: dict[str, Any]) -> str:
    rows = [
        [
            "source", "bare, M tokens/s of CPU", "while training", "share", "share by the clock",
            "kept tokens, M/s of CPU",
        ]
    ]  # fmt: skip
    for name, one in results.items():
        million = [f"{one[f'{kind}_per_cpu_second'] / 1e6:,.2f}" for kind in ("bare", "ours")]
        shares = [f"{one[f'share_by_{unit}']:.0%}" for unit in ("cpu", "clock")]
        rows.append([name, *million, *shares, f"{one['kept_per_cpu_second'] / 1e6:,.0f}"])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=2)
    parser.add_argument("--one", help="settings of the source to measure, as JSON")
    given = parser.parse_args()
    if given.one is not None:
        with tempfile.TemporaryDirectory() as run:
            print(json.dumps(measured(json.loads(given.one), given.rounds, Path(run))))
        return
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_DATASETS_CACHE": str(folder / "tables")}
        for label, settings in sources(folder, given.megabytes).items():
            # A process of its own: what one source leaves in the heap changes the speed of the next.
            words = ["--rounds", str(given.rounds), "--one", json.dumps(settings)]
            argv = [sys.executable, __file__, *words]
            environment = {**os.environ, **own}
            done = subprocess.run(
                argv, stdout=subprocess.PIPE, text=True, check=True, env=environment
            )
            results[label] = json.loads(done.stdout.splitlines()[-1])
            print(label, results[label], file=sys.stderr)
    document = {"results": results, "command": "python tests/bench/tokenizing.py", **machine()}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    into_page(PAGE, "tokenizing", table(results))
    print(table(results))


if __name__ == "__main__":
    main()
