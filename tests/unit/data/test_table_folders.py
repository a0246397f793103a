"""Tables of a folder that differ in columns: those that are not read do not matter, and errors name the right file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.opening import open_source

Rows = list[dict[str, Any]]
SUFFIXES = [".csv", ".jsonl", ".parquet"]
TEXT: Rows = [{"text": "a", "id": 1}, {"text": "b", "id": 2}]
OTHERS: dict[str, Rows] = {
    "another column": [{"id": 3, "score": 0.5, "text": "c"}],
    "a column less": [{"text": "c"}],
    "another type": [{"text": "c", "id": "three"}],
    "another form": [{"text": "c", "id": [3]}],
}


def write(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        cells = [list(rows[0]), *(row.values() for row in rows)]
        path.write_text("".join(",".join(map(str, row)) + "\n" for row in cells))
    return path


def opened(path: Path, **changes: Any) -> Any:
    named = {f"data.{key}": value for key, value in changes.items()}
    return open_source(replace(Plan(), {"data.source": str(path), **named}), 300)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("other", OTHERS)
def test_columns_that_are_not_read_may_differ(suffix: str, other: str, tmp_path: Path) -> None:
    write(tmp_path / "t" / f"0{suffix}", TEXT)
    write(tmp_path / "t" / f"1{suffix}", OTHERS[other])
    assert opened(tmp_path / "t").read(0, 3) == ["a", "b", "c"]
    assert opened(tmp_path / "t", template="={{ text }}").read(0, 3) == ["=a", "=b", "=c"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_field_that_one_table_lacks_is_missing_there(suffix: str, tmp_path: Path) -> None:
    write(tmp_path / "t" / f"0{suffix}", TEXT)
    write(tmp_path / "t" / f"1{suffix}", OTHERS["another column"])
    found = opened(tmp_path / "t", template="{{ text }}{% if score %} {{ score }}{% endif %}")
    assert found.read(0, 3) == ["a", "b", "c 0.5"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_without_text_is_named(suffix: str, tmp_path: Path) -> None:
    for number, rows in enumerate((TEXT, [{"id": 1}], TEXT)):
        write(tmp_path / "t" / f"{number}{suffix}", rows)
    with pytest.raises(PlanError, match=rf'1\{suffix}: no column "text"'):
        opened(tmp_path / "t")


def test_lines_without_text_are_empty_whatever_else_they_hold(tmp_path: Path) -> None:
    for number, rows in enumerate((TEXT[:1] * 2000, [{"other": 1}], TEXT)):
        write(tmp_path / "t" / f"{number}.jsonl", rows)
    assert opened(tmp_path / "t").read(1999, 2002) == ["a", "", "a"]


def test_the_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "t" / "0.csv", TEXT)
    (tmp_path / "t" / "1.csv").write_text("text,id\na,b,c\nd,e\nf,g,h,i\n")
    with pytest.raises(DataError, match=r"1\.csv: cannot be read as csv: .*line 4"):
        opened(tmp_path / "t")
    write(tmp_path / "p" / "0.parquet", TEXT)
    write(tmp_path / "p" / "1.parquet", [{"text": 5}])
    with pytest.raises(PlanError, match=r'1\.parquet: column "text" holds int64, not text'):
        opened(tmp_path / "p")
    with pytest.raises(DataError, match=r'1\.parquet: column "text" holds int64; in .*0\.parquet'):
        opened(tmp_path / "p", template="{{ text }}")


def test_only_the_text_of_parquet_is_copied_and_its_fingerprint_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [{"vector": [0.5] * 1000, "text": str(i)} for i in "abc"])
    found = opened(path)
    digest = hashlib.sha256(b"3/text/['vector', 'text']abc")
    assert found.fingerprint == digest.hexdigest()
    assert sum(f.stat().st_size for f in (tmp_path / "cache").rglob("*.arrow")) < 2000
