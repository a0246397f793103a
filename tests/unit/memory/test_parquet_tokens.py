"""Tokens of Parquet before the first run: of the text column alone, as the footer tells its size."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from memconsole.memory.state import data
from memconsole.memory.state.data import dataset_tokens
from memconsole.plan.catalog import parquet_sizes
from memconsole.plan.catalog.parquet_sizes import ColumnSize, column_size
from memconsole.plan.plan import Plan, replace

TEXTS = [f"{number} " + "some words of a text " * (number % 30) for number in range(500)]
BYTES = sum(map(len, TEXTS))


def write(path: Path, **options: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "vector": [[0.5] * 50] * len(TEXTS),
        "text": TEXTS,
        "of": [{"a": n, "b": [True, False]} for n in range(len(TEXTS))],
    }
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def tokens(source: Path, **changes: Any) -> int:
    return dataset_tokens(replace(Plan(), {"data.source": str(source), **changes})) or 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_group_size": 7},
        {"compression": "none", "use_dictionary": False},
        {"version": "1.0"},
    ],
    ids=["default", "small groups", "plain", "1.0"],
)
def test_only_the_text_is_counted(options: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", **options)
    size = column_size(path, "text")
    assert size is not None
    assert size.rows == len(TEXTS)
    assert size.bytes == BYTES
    assert tokens(path) == int(size.bytes / 3.6)
    assert tokens(path, **{"data.max_examples": 250}) == pytest.approx(tokens(path) / 2, abs=1)


def test_files_of_old_writers_tell_the_size_of_the_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_sizes, "_TEXT_BYTES", -1)
    size = column_size(write(tmp_path / "a.parquet"), "text")
    assert size is not None
    assert size.bytes == pytest.approx(BYTES, rel=0.1)


def test_the_files_of_a_folder_are_added_up(tmp_path: Path) -> None:
    for name in "ab":
        path = write(tmp_path / "t" / f"{name}.parquet")
    assert tokens(tmp_path / "t") == pytest.approx(2 * tokens(path), abs=1)


def test_of_many_files_some_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "t"
    one = write(folder / "0.parquet")
    for number in range(1, 70):
        shutil.copyfile(one, folder / f"{number}.parquet")
    read: list[Path] = []
    monkeypatch.setattr(data, "column_size", lambda path, _: read.append(path) or ColumnSize(9, 36))
    assert tokens(folder) == pytest.approx(70 * 36 / 3.6, abs=1)
    assert 16 < len(read) <= data.MOST_FOOTERS


def test_what_no_footer_tells_is_guessed_from_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    guess = round(path.stat().st_size / 1.8)
    assert tokens(path, **{"data.text_column": "body"}) == guess
    assert tokens(path, **{"data.template": "{{ text }}"}) == guess


def test_damaged_footers_tell_nothing(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.parquet").read_bytes()
    size = column_size(tmp_path / "a.parquet", "text")
    chance = random.Random(1)
    for number in range(100):
        damaged = bytearray(whole)
        for _ in range(20):
            damaged[chance.randrange(len(whole) - 2000, len(whole))] = chance.randrange(256)
        path = tmp_path / f"{number}.parquet"
        path.write_bytes(damaged[: chance.choice((5, None))])
        assert column_size(path, "text") in (None, size)  # the damage may miss what is read
