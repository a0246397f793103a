"""Texts of JSON Lines that are read from the lines themselves: what they are, and which files are read as tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.plan.plan import DataChoice
from memconsole_trainer.data.sources import json_texts
from memconsole_trainer.data.sources.documents import ColumnDocuments, DataError, Documents
from memconsole_trainer.data.sources.json_texts import JsonTexts
from memconsole_trainer.data.sources.opening import open_path

WITHOUT_LIBRARIES = """
import sys
from pathlib import Path
from memconsole.plan.plan import DataChoice
from memconsole_trainer.data.sources.opening import open_path
print(open_path(Path(sys.argv[1]), "text", 300, DataChoice()).read(0, 2))
print({"datasets", "pandas", "pyarrow"} & set(sys.modules))
"""


def opened(path: Path, **changes: Any) -> Documents:
    found = open_path(path, "text", 300, DataChoice(**changes))
    assert isinstance(found, (JsonTexts, ColumnDocuments))
    return found


def texts(found: Documents) -> list[str]:
    return found.read(0, found.count or 0)


def test_lines_are_read_without_the_libraries_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"n": 1, "text": "two"}\r\n')
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, path], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == ["['one', 'two']", "set()"]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ROWS = st.lists(
    st.fixed_dictionaries(
        {}, optional={"text": st.none() | TEXT, "n": st.integers(0, 9), "more": st.lists(TEXT)}
    ),
    min_size=1,
    max_size=12,
)


@given(ROWS, st.booleans())
def test_the_texts_are_those_of_the_table(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], ascii: bool
) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows), "utf-8")
    found = json_texts.json_texts([path], [path], "text", None)
    if found is None:
        assert not any(row.get("text") is not None for row in rows)
        return
    assert texts(found) == [row.get("text") or "" for row in rows]


@pytest.mark.parametrize(
    "line",
    ['{"text": 1}', "null", "[]", '{"text": "a"', '{"text": "a", "n": NaN}', '{"text": "\\ud800"}'],
)
def test_a_file_with_another_line_is_left_to_the_table_reader(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    assert json_texts.json_texts([path], [path], "text", None) is None
    assert json_texts.json_texts([path], [path], "text", 1) is not None, "the first line is good"


def test_bytes_that_are_no_utf_8_are_left_to_the_table_reader(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "na\xefve"}\n')
    assert json_texts.json_texts([path], [path], "text", None) is None
    assert texts(opened(path)) == ["na\N{REPLACEMENT CHARACTER}ve"]


def test_large_files_are_left_to_the_table_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": null}\n{"text": "three"}\n')
    small = opened(path)
    assert isinstance(small, JsonTexts)
    monkeypatch.setattr(json_texts, "MOST_BYTES", 20)
    large = opened(path)
    assert isinstance(large, ColumnDocuments)
    assert texts(small) == texts(large) == ["one", "", "three"]
    assert small.fingerprint == large.fingerprint
    assert small.block_hashes.state() == large.block_hashes.state()  # type: ignore[union-attr]


def test_a_line_that_changes_after_the_file_was_opened_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    found = opened(path)
    path.write_text('{"text": "one"}\n{"text": 12345}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: line 2: Expected `str \| null`, got `int`"):
        texts(found)
