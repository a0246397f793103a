"""Objects of JSON files: read as they are written, wherever they begin and end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan.plan import PlanError
from memconsole_trainer.data.sources.documents import DataError
from tests.unit.data.opened import opened

ROWS: list[dict[str, Any]] = [
    {"text": "2024-01-01", "n": 1, "of": {"a": [1, {"b": "}]"}]}},
    {"text": "2024-01-02T03:04:05", "n": 2.5, "of": {"c": None}},
    {"text": "2024-01-03", "n": 3, "of": {"d": '\\"[{é\n"'}},
]


def lines(rows: list[dict[str, Any]], **options: Any) -> str:
    return "\n".join(json.dumps(row, **options) for row in rows)


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(ROWS),
        "\ufeff \n" + json.dumps(ROWS, indent=1, ensure_ascii=False) + "\n",
        lines(ROWS),
        lines(ROWS, indent=2),
    ],
    ids=["array", "indented", "lines", "objects"],
)
def test_records_of_json_are_those_of_json_lines(written: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(lines(ROWS))
    (tmp_path / "t.json").write_text(written, encoding="utf-8")
    of_lines, of_objects = (
        opened(tmp_path / f"t{suffix}", template="{{ text }} {{ n }} {{ of | tojson }}")
        for suffix in (".jsonl", ".json")
    )
    assert of_objects.read(0, 3) == of_lines.read(0, 3)
    assert "2024-01-01 1 " in of_objects.read(0, 1)[0]
    with pytest.raises(DataError, match=r't\.json: row 2 has no field "more"'):
        opened(tmp_path / "t.json", template="{{ more }}").read(1, 2)


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_column_of_dates_is_text(suffix: str, tmp_path: Path) -> None:
    texts = [{"text": row["text"]} for row in ROWS]
    path = tmp_path / f"t{suffix}"
    path.write_text(json.dumps(texts) if suffix == ".json" else lines(texts))
    assert opened(path).read(0, 3) == [row["text"] for row in ROWS]


def test_objects_longer_than_what_is_read_at_once_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memconsole_trainer.data.sources import json_objects

    monkeypatch.setattr(json_objects, "BLOCK_BYTES", 7)
    rows = [{"text": "é" * length + '{"[,'} for length in range(40)]
    (tmp_path / "t.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    assert opened(tmp_path / "t.json", template="{{ text }}").read(0, 40) == [
        row["text"] for row in rows
    ]


def test_files_that_are_no_list_of_objects_are_read_as_tables(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(["a", "b"]))
    assert opened(tmp_path / "t.json", template="={{ text }}").read(0, 2) == ["=a", "=b"]
    for damaged in ('[{"text": "a"}, {"text"', '[{"text": "a"} {"text": "b"}]', "[]"):
        (tmp_path / "t.json").write_text(damaged)
        with pytest.raises(DataError, match=r"t\.json: "):
            opened(tmp_path / "t.json", template="{{ text }}")


@pytest.mark.parametrize(("suffix", "place"), [(".json", "row 3"), (".jsonl", "line 3")])
@pytest.mark.parametrize("value", [5, ["a"], {"a": "b"}])
def test_the_row_whose_text_is_something_else_is_named(
    suffix: str, place: str, value: Any, tmp_path: Path
) -> None:
    rows = [{"text": "a"}, {"text": None}, {"text": value}, {"text": "b"}]
    path = tmp_path / f"t{suffix}"
    path.write_text(json.dumps(rows) if suffix == ".json" else lines(rows))
    words = re.escape(f'{path}: {place}: field "text" holds {value}, expected text')
    with pytest.raises(PlanError, match=words):
        opened(path)
