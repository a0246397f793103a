"""What a plan's data source may be, and what is said when it cannot be used."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from memconsole.plan.machine import stdlib
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.data.inspect import inspect
from memconsole_trainer.data.sources.documents import (
    PIECE_BYTES,
    DataError,
    Documents,
    FileDocuments,
    StreamDocuments,
)
from memconsole_trainer.data.sources.hdf5 import Hdf5Texts, TokenRows
from memconsole_trainer.data.sources.opening import open_source
from memconsole_trainer.data.sources.split import Last, Split, split_of
from memconsole_trainer.data.text.blocks.text_blocks import TextBlocks
from memconsole_trainer.data.text.rows.validation import from_texts
from memconsole_trainer.data.text.tokens.tokenizer import train
from tests.unit.data.opened import opened


def texts(source: Documents) -> list[str]:
    assert source.count is not None
    return source.read(0, source.count)


def test_the_standard_library_is_its_own_source_files() -> None:
    source = open_source(Plan(), 300)
    assert isinstance(source, FileDocuments)
    assert source.total_bytes == sum(stdlib.sizes())
    first = stdlib.files()[0].read_text("utf-8", "replace")
    assert source.read(0, 1)[0] == first[: len(source.read(0, 1)[0])]


def test_a_long_file_is_cut_after_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"line {i} of a long text with ümlauts\n" for i in range(9000))
    (tmp_path / "long.txt").write_text(text)
    source = opened(tmp_path / "long.txt")
    pieces = texts(source)
    assert len(pieces) > 4
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)
    assert max(len(p.encode()) for p in pieces) <= 2 * PIECE_BYTES


@pytest.mark.parametrize("size", [4_000, 20_000, 90_000, 300_000])
def test_a_lone_file_has_enough_pieces_to_hold_some_out(size: int, tmp_path: Path) -> None:
    text = "".join(f"Line {i} of a short text.\n" + "\n" * (i % 7 == 0) for i in range(20_000))
    (tmp_path / "short.txt").write_text(text[:size])
    source = opened(tmp_path / "short.txt")
    pieces = texts(source)
    assert "".join(pieces) == text[:size]
    assert 10 <= len(pieces) <= 16
    assert min(len(piece) for piece in pieces) >= 100
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert 0 < Split(source.count, 0.05).held_out(0, len(pieces)).sum() < 3


def test_a_file_of_many_is_trained_on_or_held_out_as_a_whole(tmp_path: Path) -> None:
    for number in range(30):
        lines = 6000 if number % 5 == 0 else 5
        text = "".join(f"file {number} line {i} of some text\n" for i in range(lines))
        (tmp_path / f"{number:02d}.txt").write_text(text)
    source = opened(tmp_path)
    assert source.count > 30
    split = split_of(source, 0.3)
    held = split.held_out(0, source.count)
    assert 0 < held.sum() < source.count
    sides: dict[str, set[bool]] = {}
    for text, out in zip(texts(source), held, strict=True):
        sides.setdefault(text.split(" line")[0], set()).add(bool(out))
    assert len(sides) == 30
    assert all(len(side) == 1 for side in sides.values())
    parts = [split.held_out(i, min(i + 7, source.count)) for i in range(0, source.count, 7)]
    np.testing.assert_array_equal(np.concatenate(parts), held)
    blocks = TextBlocks(source, split, train(source.read(0, 1), 300), 8, 8)
    size = sum(len(text) for text, out in zip(texts(source), held, strict=True) if not out)
    assert blocks.train_bytes() == size


def test_of_a_large_and_a_small_file_the_small_one_is_held_out(tmp_path: Path) -> None:
    for names in (("a", "b"), ("b", "a")):
        (tmp_path / f"{names[0]}.txt").write_text("some words\n" * 60_000)
        (tmp_path / f"{names[1]}.txt").write_text("other words\n" * 100)
        source = opened(tmp_path)
        held = split_of(source, 0.05).held_out(0, source.count)
        kept = [text[:5] for text, out in zip(texts(source), held, strict=True) if out]
        assert kept == ["other"]


def test_a_long_line_is_never_cut_inside_a_character(tmp_path: Path) -> None:
    text = "x" + "日本語" * 60_000
    (tmp_path / "long.txt").write_text(text)
    pieces = texts(opened(tmp_path / "long.txt"))
    assert len(pieces) > 4
    assert "".join(pieces) == text


def test_a_directory_is_its_text_files_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "sub/c.py", ".hidden/d.txt", "e.bin", "empty.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.txt" else name)
    assert texts(opened(tmp_path / "data")) == ["a.txt", "b.md", "sub/c.py"]
    assert texts(opened(tmp_path / "data", max_examples=2)) == ["a.txt", "b.md"]


ROWS = [{"body": "one", "n": 1}, {"body": "two\nlines", "n": 2}, {"body": "three", "n": 3}]


def write_table(path: Path) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".csv":
        path.write_text("body,n\n" + "".join(f'"{r["body"]}",{r["n"]}\n' for r in ROWS))
    else:
        pq = pytest.importorskip("pyarrow.parquet")
        pa = pytest.importorskip("pyarrow")
        pq.write_table(pa.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_tables_are_read_through_their_text_column(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    write_table(path)
    assert texts(opened(path, text_column="body")) == ["one", "two\nlines", "three"]
    assert texts(opened(path, text_column="body", max_examples=1)) == ["one"]
    with pytest.raises(
        PlanError, match=r'no column "bdy" — did you mean "body"\?.*body \((large_)?string\)'
    ):
        opened(path, text_column="bdy")
    if suffix == ".csv":  # every cell is text
        assert texts(opened(path, text_column="n"))[0] == "1"
        return
    with pytest.raises(PlanError, match=r'column "n" holds int64, not text'):
        opened(path, text_column="n")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_what_lies_beside_tables_in_a_folder_does_not_hide_them(
    suffix: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    write_table(folder / f"a{suffix}")
    write_table(folder / "deep" / f"b{suffix}")
    for name in ("README.md", "LICENSE.txt", "dataset.yml", "dataset_info.json"):
        (folder / name).write_text('{"about": "this data"}')
    assert texts(opened(folder, text_column="body")) == ["one", "two\nlines", "three"] * 2


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["a.jsonl", "b.csv"], r"1 \.csv, 1 \.jsonl"),
        (["a.csv", "b.tsv"], r"1 \.csv, 1 \.tsv"),
        (["a.parquet", "b.json"], r"1 \.json, 1 \.parquet"),
        (["a.parquet", "story.txt", "story.md"], r"1 \.parquet, 2 text"),
        (["a.h5", "readme.md", "b.py"], r"1 \.h5, 1 text"),
    ],
)
def test_a_folder_of_several_kinds_is_refused_with_the_kinds(
    names: list[str], kinds: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_text("some")
    with pytest.raises(PlanError, match=rf"several kinds \({kinds}\): give one file or") as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_table_is_bad_data_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_table(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read as parquet"):
        opened(path, text_column="body")


def hdf5(path: Path, **content: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in content.items():
            if isinstance(values[0], str):
                file.create_dataset(name, data=values, dtype=h5py.string_dtype())
            else:
                file.create_dataset(name, data=values)
    return path


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text("text\nsome words\n")
    (tmp_path / "file").touch()
    tables = tmp_path / "file" / "tables"  # below a file nothing can be made, by root neither
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tables)
    with pytest.raises(DataError) as refused:
        open_source(replace(Plan(), {"data.source": str(tmp_path / "a.csv")}), 300)
    assert str(refused.value) == (
        f"{tmp_path}/a.csv: its table cannot be written to {tables}: Not a directory; "
        "HF_DATASETS_CACHE names another folder"
    )


def test_hdf5_integers_are_token_rows_and_strings_are_texts(tmp_path: Path) -> None:
    rows = np.arange(60, dtype=np.int64).reshape(10, 6)
    source = opened(hdf5(tmp_path / "rows.h5", tokens=rows))
    assert isinstance(source, TokenRows)
    assert (source.count, source.width) == (10, 6)
    np.testing.assert_array_equal(source.rows(3, 7), rows[3:7])
    text = opened(hdf5(tmp_path / "text.h5", body=["one", "zwei ü", ""]))
    assert isinstance(text, Hdf5Texts)
    assert texts(text) == ["one", "zwei ü", ""]


def test_hdf5_that_fits_nothing_or_several_names_what_it_holds(tmp_path: Path) -> None:
    floats = hdf5(tmp_path / "f.h5", controls=np.zeros((4, 3)))
    with pytest.raises(PlanError, match=r"no dataset fits.*controls 4x3 float64"):
        opened(floats)
    both = hdf5(tmp_path / "b.h5", a=np.zeros((4, 3), dtype=int), b=["x"])
    with pytest.raises(PlanError, match=r"several datasets fit.*a 4x3 int64, b 1 object"):
        opened(both)
    assert isinstance(opened(both, text_column="a"), TokenRows)


def test_a_token_outside_the_vocabulary_is_bad_data_with_its_row(tmp_path: Path) -> None:
    rows = np.zeros((10, 6), dtype=np.int32)
    rows[7, 2] = 300
    source = opened(hdf5(tmp_path / "rows.h5", tokens=rows))
    with pytest.raises(DataError, match=r"row 7 of tokens holds token 300.*ends at 299"):
        source.rows(5, 10)


def test_damaged_hdf5_is_bad_data(tmp_path: Path) -> None:
    path = hdf5(tmp_path / "rows.h5", tokens=np.zeros((1000, 6), dtype=np.int32))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"rows\.h5"):
        opened(path)


def test_an_open_hdf5_handle_never_travels_to_another_process(tmp_path: Path) -> None:
    source = opened(hdf5(tmp_path / "rows.h5", tokens=np.ones((10, 6), dtype=np.int32)))
    assert source._handle is not None
    copy = pickle.loads(pickle.dumps(source))
    assert copy._handle is None
    np.testing.assert_array_equal(copy.rows(0, 2), np.ones((2, 6)))


def test_missing_binary_and_empty_sources_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="nowhere"):
        opened(tmp_path / "nowhere.txt")
    (tmp_path / "b.dat").write_bytes(b"a\0b")
    with pytest.raises((DataError, PlanError), match=r"b\.dat"):
        opened(tmp_path / "b.dat")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(PlanError, match="nothing"):
        opened(tmp_path / "nothing")


def test_a_file_that_shrinks_or_vanishes_while_training_is_bad_data(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello world")
    source = opened(path)
    path.write_text("hell")
    with pytest.raises(DataError, match="became shorter"):
        source.read(0, 1)
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        source.read(0, 1)


def test_a_dangling_link_is_passed_over_and_an_unreadable_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some words")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "gone.jsonl")
    assert "".join(texts(opened(tmp_path))) == "some words"

    def refuse(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    for module in ("opening", "documents"):
        monkeypatch.setattr(f"memconsole_trainer.data.sources.{module}.open_regular", refuse)
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(DataError, match=r"a\.txt: cannot be read: Permission denied"):
            opened(path)


def test_changed_data_changes_the_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    prints = set()
    for content in ("hello", "hallo", "hello!"):
        path.write_text(content)
        prints.add(opened(path).fingerprint)
    path.write_text("hello")
    assert len(prints) == 3
    assert opened(path).fingerprint in prints


def test_a_hub_dataset_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True, raising=False)
    plan = replace(Plan(), {"data.source": "hf://nobody/nothing-of-this-name"})
    with pytest.raises(DataError, match=r"hf://nobody/nothing-of-this-name: cannot be opened"):
        open_source(plan, 300)


def test_a_stream_may_begin_with_a_row_without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [{"text": None, "n": 1}, {"text": "hello", "n": 2}]
    plan = replace(Plan(), {"data.source": "hf://some/where", "data.streaming": True})
    typed = datasets.Features({"text": datasets.Value("string"), "n": datasets.Value("int64")})
    for features in (typed, None):
        stream = datasets.IterableDataset.from_generator(lambda: iter(rows), features=features)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, s=stream, **__: s)
        found = open_source(plan, 300)
        assert isinstance(found, StreamDocuments)
        assert "hello" in list(found.iterate(0))
        with pytest.raises(PlanError, match=r"column \"n\" holds int"):
            open_source(replace(plan, {"data.text_column": "n"}), 300)


@pytest.mark.parametrize("shape", [(0, 6), (4, 0)])
def test_an_empty_table_of_tokens_is_named(shape: tuple[int, int], tmp_path: Path) -> None:
    path = hdf5(tmp_path / "rows.h5", labels=["a"])
    with h5py.File(path, "a") as file:
        file.create_dataset("tokens", data=np.zeros(shape, np.int64))
    plan = replace(Plan(), {"data.source": str(path), "data.text_column": "tokens"})
    for look in (lambda: open_source(plan, 300), lambda: inspect(plan)):
        with pytest.raises(DataError, match="tokens holds no tokens"):
            look()


class FakeStream:
    """What `datasets` calls an IterableDataset, of so many rows."""

    def __init__(self, count: int, first: int = 0) -> None:
        self._range = range(first, count)

    def skip(self, number: int) -> FakeStream:
        return FakeStream(self._range.stop, self._range.start + number)

    def __iter__(self) -> Any:
        return ({"text": f"text number {i}"} for i in self._range)


def test_a_stream_is_read_in_blocks_that_can_start_anywhere() -> None:
    source = StreamDocuments(FakeStream(300), "text", "hf://a/b", max_examples=250)
    assert list(source.iterate(247)) == [f"text number {i}" for i in range(247, 250)]
    tokenizer = train(source.read(0, 50), 300)
    blocks = TextBlocks(source, Split(None, 0.1), tokenizer, 8, 8)
    everything = [tokens.tolist() for tokens in blocks.iterate(0)]
    assert len(everything) == -(-250 // source.block_size)
    for start in range(len(everything)):
        assert [t.tolist() for t in blocks.iterate(start)] == everything[start:]


def test_no_held_out_document_is_trained_on() -> None:
    source = StreamDocuments(FakeStream(400), "text", "hf://a/b", None)
    tokenizer = train(source.read(0, 50), 300)
    split = Split(None, 0.2)
    held = split.held_out(0, 400)
    blocks = TextBlocks(source, split, tokenizer, 8, 8)
    end = "<|endoftext|>"
    trained = "".join(tokenizer.decode(t.tolist()) for t in blocks.iterate(0)).split(end)[:-1]
    assert trained == [f"text number {i}" for i in range(400) if not held[i]]
    validation = from_texts(source, split, tokenizer, 8)
    ids = np.concatenate([validation.rows[i][:-1] for i in range(len(validation))])
    kept = tokenizer.decode(ids.tolist()).split(end)[:-1]
    assert kept == [f"text number {i}" for i in range(400) if held[i]][: len(kept)]
    assert len(kept) >= held.sum() - 1


class Sparse(FakeStream):
    """Most of its rows hold no text."""

    def skip(self, number: int) -> Sparse:
        return Sparse(self._range.stop, self._range.start + number)

    def __iter__(self) -> Any:
        return ({"text": sparse(i)} for i in self._range)


def sparse(number: int) -> str | None:
    return f"text number {number}" if number % 3 == 0 else "" if number % 3 == 1 else None


@pytest.mark.parametrize("kind", ["stream", "table"])
def test_rows_without_text_give_no_tokens_and_keep_their_numbers(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": sparse(i)}) + "\n" for i in range(200)))
    source = (
        StreamDocuments(Sparse(200), "text", "hf://a/b", None) if kind == "stream" else opened(path)
    )
    assert source.read(0, 4) == ["text number 0", "", "", "text number 3"]
    split = Split(source.count, 0.2)
    held = split.held_out(0, 200)
    tokenizer = train(["text number 0123456789"], 300)
    full = np.arange(0, 200, 3)
    wanted = [
        tokenizer.encode([f"text number {i}" for i in full[held[full] == side]]).tolist()
        for side in (False, True)
    ]
    blocks = TextBlocks(source, split, tokenizer, 8, 8)
    assert np.concatenate(list(blocks.iterate(0))).tolist() == wanted[0]
    assert blocks.seen.documents == 200
    validation = from_texts(source, split, tokenizer, 8)
    rows = [validation.rows[i] for i in range(len(validation))]
    assert np.concatenate([rows[0], *(row[1:] for row in rows[1:])]).tolist() == wanted[1]


def test_blocks_tokenized_together_are_those_tokenized_one_by_one(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02d}.txt").write_text(
            f"document {number}, of so many words\n" * number
        )
    source = opened(tmp_path)
    split = split_of(source, 0.2)
    tokenizer = train(texts(source), 300)

    def blocks() -> TextBlocks:
        return TextBlocks(source, split, tokenizer, 8, 8)

    alone = blocks()
    wanted = [alone.block(index).tolist() for index in range(alone.count or 0)]
    together = blocks()
    assert [t.tolist() for t in together.several(range(len(wanted)))] == wanted
    assert together.seen == alone.seen
    held = split.held_out(0, source.count)
    kept = [text for text, out in zip(texts(source), held, strict=True) if not out]
    assert alone.seen.train_bytes == sum(map(len, kept))
    streamed = blocks()
    assert streamed.together == 1
    assert [t.tolist() for t in streamed.iterate(0)] == wanted
    assert streamed.together > 1


@pytest.mark.parametrize("files", [1, 20])
def test_the_last_part_of_a_text_is_held_out(files: int, tmp_path: Path) -> None:
    whole = [f"line {n} of a text\n" for n in range(24_000)]
    for number in range(files):
        part = whole[number * len(whole) // files : (number + 1) * len(whole) // files]
        (tmp_path / f"{number:02}.txt").write_text("".join(part))
    source = opened(tmp_path if files > 1 else tmp_path / "00.txt")
    split = split_of(source, 0.1, "last")
    held = split.held_out(0, source.count)
    found = texts(source)
    train_text = "".join(text for text, out in zip(found, held, strict=True) if not out)
    held_text = "".join(text for text, out in zip(found, held, strict=True) if out)
    assert train_text + held_text == "".join(whole), (
        "nothing after the first held-out text is trained on"
    )
    assert 0.06 < len(held_text) / len("".join(whole)) < 0.16


@pytest.mark.parametrize("fraction", [1e-9, 0.1, 0.4])
def test_one_of_two_documents_at_least_is_on_each_side_of_the_last(fraction: float) -> None:
    for count in (2, 3, 10, 1001):
        held = Last(count, fraction).held_out(0, count)
        assert held.sum() == min(max(round(count * fraction), 1), count - 1)
        assert not held[: count - held.sum()].any()
    assert not Last(1, fraction).held_out(0, 1).any()
    assert not Last(10, 0.0).held_out(0, 10).any()
