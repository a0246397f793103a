"""Rows of several sources: their shares, their order, and the exact rest of it after any batch."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memconsole.plan.models.sizing import size
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchShape, BatchStream
from memconsole_trainer.data.text.opened import open_text
from memconsole_trainer.data.text.prepared import Prepared, prepare
from memconsole_trainer.data.text.rows.batches import TextRows
from memconsole_trainer.data.text.rows.rows import Other, Source, epoch_rows
from memconsole_trainer.data.text.rows.validation import Validation, joined, rows_by_shares
from memconsole_trainer.data.text.run_tokenizer import make_tokenizer
from memconsole_trainer.data.text.tokens.tokenizer import Tokens
from memconsole_trainer.data.text.tokens.tokens import ArrayRows

LENGTH = 4


class Blocks:
    """Blocks of `first`, `first` + 1, …, so that a token tells its source and its place."""

    together = 3

    def __init__(self, first: int, count: int, block: int = 12, sequential: bool = False) -> None:
        self._all = np.arange(first, first + count, dtype=np.uint16)
        self._block = block
        self._blocks = -(-count // block)
        self.count = None if sequential else self._blocks
        self.row_tokens, self.stride = LENGTH + 1, LENGTH

    def several(self, indices: Sequence[int]) -> list[Tokens]:
        return [self._all[i * self._block : (i + 1) * self._block] for i in indices]

    def iterate(self, start: int) -> Iterator[Tokens]:
        yield from self.several(range(start, self._blocks))


def mixed_rows(held: bool, buffer: int) -> TextRows:
    blocks = [Blocks(0, 900), Blocks(1000, 120), Blocks(2000, 90, sequential=True)]
    tokens = [np.concatenate(list(b.iterate(0))) if held else None for b in blocks]
    others = [Other(Source(blocks[i], tokens[i]), share) for i, share in ((1, 0.3), (2, 0.1))]
    return TextRows(blocks[0], 5, buffer, tokens[0], None, others)


def items(stream: BatchStream, epochs: int) -> list[tuple[int, Any, str]]:
    found: list[tuple[int, Any, str]] = []
    ends = 0
    while ends < epochs:
        item = stream.next()
        ends += item.batch is None
        inputs = item.batch and item.batch["inputs"].reshape(-1, LENGTH).tolist()
        found.append((item.epoch, inputs, json.dumps(item.state)))
    stream.close()
    return found


@pytest.mark.parametrize(("held", "buffer"), [(False, 16), (False, 0), (True, 16)])
def test_a_mixture_restored_after_any_item_yields_exactly_the_rest(held: bool, buffer: int) -> None:
    shape = BatchShape(1, 9, LENGTH)

    def stream(state: Any = None) -> BatchStream:
        return BatchStream(mixed_rows(held, buffer), shape, state)

    everything = items(stream(), 2)
    assert len(everything) > 60
    for position in range(0, len(everything) - 1, 4):
        state = everything[position][2]
        left = 2 - sum(inputs is None for _, inputs, _ in everything[: position + 1])
        assert items(stream(json.loads(state)), left) == everything[position + 1 :]


def test_every_row_of_the_source_comes_once_an_epoch_and_others_go_on_where_they_were() -> None:
    found = items(BatchStream(mixed_rows(True, 16), BatchShape(1, 9, LENGTH)), 2)
    rows = [
        [row for e, inputs, _ in found for row in inputs or () if e == epoch and any(row)]
        for epoch in (1, 2)
    ]
    own = [[tuple(row) for row in part if row[0] < 1000] for part in rows]
    assert sorted(own[0]) == sorted(own[1]) == [tuple(range(i, i + 4)) for i in range(0, 900, 4)]
    assert own[0] != own[1]
    for part in rows:
        shares = Counter(row[0] // 1000 for row in part)
        assert shares[1] / len(part) == pytest.approx(0.3, abs=0.08)
        assert shares[2] / len(part) == pytest.approx(0.1, abs=0.05)
    for number, blocks in ((1, 120), (2, 90)):
        met = [row[0] for part in rows for row in part if row[0] // 1000 == number]
        each = -(-(blocks - 1) // LENGTH)
        passes = [met[i : i + each] for i in range(0, len(met), each)]
        assert len(passes) > 2
        assert all(len(set(one)) == len(one) for one in passes)
        assert all(sorted(one) == sorted(passes[0]) for one in passes[:-1])
        assert passes[0] != passes[1]


def test_an_empty_source_of_a_mixture_is_told() -> None:
    rows = epoch_rows(Source(Blocks(0, 90)), [Other(Source(Blocks(0, 1)), 0.5)], 1, 1, 0)
    with pytest.raises(DataError, match=r"source 1 of data\.mix holds nothing"):
        list(rows)


WORDS = {"a": "apple and pear ", "b": "beech or oak ", "c": "carp nor pike "}


def written(folder: Path) -> Path:
    for name, words in WORDS.items():
        (folder / name).mkdir()
        for number in range(40):
            (folder / name / f"{number:02d}.txt").write_text(f"{number} " + words * (number + 3))
    return folder


def prepared(plan: Plan, folder: Path) -> tuple[Prepared, list[str]]:
    architecture, said = size(200_000, 300, 64), list[str]()
    opened = open_text(plan, 300)
    run = folder / "run"
    run.mkdir(exist_ok=True)
    tokenizer = make_tokenizer(plan, architecture, opened, run / "tokenizer.json", None)
    found = prepare(
        plan, architecture, opened, tokenizer, run / "data.json", lambda: None, said.append
    )
    return found, said


def plan(folder: Path, **changes: Any) -> Plan:
    named = {f"data.{key}": value for key, value in changes.items()}
    return replace(Plan(), {"data.source": str(folder / "a"), "data.sequence_length": 8, **named})


def texts(found: Prepared, arrays: list[Any]) -> str:
    assert found.tokenizer is not None
    return " ".join(found.tokenizer.decode(a.reshape(-1).tolist()) for a in arrays)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_run_trains_on_all_sources_and_validates_on_each(streaming: bool, tmp_path: Path) -> None:
    folder = written(tmp_path)
    mix = f"{folder / 'b'}=0.3,{folder / 'c'}=0.2"
    found, _ = prepared(plan(folder, mix=mix, streaming=streaming), folder)
    alone, _ = prepared(plan(folder, streaming=streaming), folder)
    assert [p.share for p in found.portions] == [0.5, 0.3, 0.2]
    shape = BatchShape(1, 4, 8)
    wanted = alone.portions[0].rows / 0.5 / 4
    assert found.steps_per_epoch(shape) == pytest.approx(wanted, rel=0.3)
    validated = texts(found, [b["inputs"] for b in found.validation.batches(shape, 0)])
    assert all(word in validated for word in ("apple", "beech", "carp"))
    size_of = found.counts.sum()
    assert size_of == pytest.approx(found.portions[0].counts.sum() / 0.5, rel=0.01)
    assert "50.0% " in found.description
    assert found.fingerprint != alone.fingerprint


def held_out(first: int, rows: int) -> Validation:
    """Rows of `first`, `first` + 1, …; the bytes of each token are half its id."""
    tokens = np.arange(first, first + rows * LENGTH + 1, dtype=np.int32)
    cut = [ArrayRows(part, LENGTH + 1, LENGTH) for part in (tokens, tokens // 2)]
    return Validation(rows=cut[0], tokens=len(tokens), token_bytes=cut[1], prompt=[first])


def test_held_out_rows_of_a_mixture_are_by_the_shares_and_spread_over_each_source() -> None:
    parts = [held_out(0, 500), held_out(10_000, 30), held_out(20_000, 0)]
    found = joined(parts, [0.6, 0.2, 0.2])
    firsts = [int(found.rows[number][0]) for number in range(len(found))]
    large, small = [n for n in firsts if n < 10_000], [n for n in firsts if n >= 10_000]
    assert small == list(range(10_000, 10_000 + 30 * LENGTH, LENGTH))
    assert len(large) == 90
    assert large[0] == 0
    assert set(np.diff(large)) == {5 * LENGTH, 6 * LENGTH}
    assert found.tokens == pytest.approx(120 * LENGTH, abs=3)
    shape = BatchShape(1, 7, LENGTH)
    targets = np.concatenate([b["targets"].reshape(-1) for b in found.batches(shape, 0)])
    assert found.target_bytes(shape, 0) == (targets[targets >= 0] // 2).sum()
    assert joined(parts[:1], [1.0]) is parts[0]


@pytest.mark.parametrize(
    ("counts", "shares", "taken"),
    [
        ([133, 33], [0.5, 0.5], [33, 33]),
        ([1000, 1000], [0.9, 0.1], [1000, 111]),
        ([1000, 90], [0.999, 0.001], [1000, 1]),
        ([1000, 90, 0], [0.25, 0.25, 0.5], [90, 90, 0]),
        ([0, 90], [0.9, 0.1], [0, 90]),
        ([40, 3], [0.5, 0.5], [40, 3]),
        ([0, 0], [0.5, 0.5], [0, 0]),
    ],
)
def test_the_source_with_the_fewest_rows_for_its_share_decides_how_many_there_are(
    counts: list[int], shares: list[float], taken: list[int]
) -> None:
    assert rows_by_shares(counts, shares) == taken


def test_a_tiny_source_of_a_mixture_does_not_leave_almost_nothing_to_validate_on() -> None:
    most, tiny = rows_by_shares([5000, 2], [0.5, 0.5])
    assert tiny == 2
    assert 62 <= most <= 66


def test_a_file_to_validate_on_replaces_the_share_that_is_held_out(tmp_path: Path) -> None:
    folder = written(tmp_path)
    found, said = prepared(plan(folder, validation=str(folder / "b")), folder)
    every = (
        sum(len(found.tokenizer.encode([p.read_text()])) for p in (folder / "a").iterdir())
        if found.tokenizer
        else 0
    )
    assert found.portions[0].train_tokens == every
    validated = texts(
        found, [b["inputs"] for b in found.validation.batches(BatchShape(1, 4, 8), 0)]
    )
    assert "beech" in validated
    assert "apple" not in validated
    assert not found.warnings
    assert not said


def test_what_is_validated_on_is_never_trained_on(tmp_path: Path) -> None:
    rows = [{"text": f"record {number} of so many"} for number in range(60)]
    for name, part in (("train", rows), ("held", rows[50:]), ("every", rows[::-1])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    base = replace(
        plan(tmp_path),
        {"data.source": str(tmp_path / "train.jsonl"), "data.template": "{{ text }}"},
    )
    found, _ = prepared(replace(base, {"data.validation": str(tmp_path / "held.jsonl")}), tmp_path)
    tokens = list(itertools.chain.from_iterable(found.portions[0].blocks.iterate(0)))
    assert found.tokenizer is not None
    trained = found.tokenizer.decode([t for t in tokens if t >= 0])
    assert "record 49 of" in trained
    assert not any(f"record {number} of" in trained for number in range(50, 60))
    assert "10 of the 60 documents looked at are also in data.validation" in found.warnings[0]
    with pytest.raises(DataError, match=r"copy\.jsonl holds the same as .*train\.jsonl"):
        prepared(replace(base, {"data.validation": str(tmp_path / "copy.jsonl")}), tmp_path)
    with pytest.raises(DataError, match="no text to train on beside the documents that"):
        prepared(replace(base, {"data.validation": str(tmp_path / "every.jsonl")}), tmp_path)


def test_texts_and_rows_of_tokens_are_not_mixed(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["tokens"] = np.zeros((4, 9), np.int32)
    folder = written(tmp_path)
    for changes in (
        {"mix": f"{tmp_path / 'rows.h5'}=0.5"},
        {"validation": str(tmp_path / "rows.h5")},
    ):
        with pytest.raises(PlanError, match=r"holds rows of tokens, .* holds texts"):
            open_text(plan(folder, **changes), 300)


class Hub:
    """What `datasets` calls an IterableDataset, of one split."""

    features = None

    def __init__(self, split: str, first: int = 0) -> None:
        self._split, self._first = split, first

    def skip(self, number: int) -> Hub:
        return Hub(self._split, self._first + number)

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in range(self._first, 90):
            yield {"text": f"{self._split} text of number {number}"}


def test_a_split_of_the_hub_is_validated_on_and_its_texts_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split, **__: Hub(split))
    settings = {"data.source": "hf://owner/name", "data.validation": "test", "train.max_steps": 9}
    found, _ = prepared(replace(plan(tmp_path), settings), tmp_path)
    assert found.portions[0].description.startswith("hf://owner/name: a stream")
    trained = texts(found, list(found.portions[0].blocks.iterate(0)))
    assert "train text of number 89" in trained
    assert "test text" not in trained
    held = texts(found, [b["inputs"] for b in found.validation.batches(BatchShape(1, 4, 8), 0)])
    assert "test text of number 88" in held
    assert "train text" not in held
