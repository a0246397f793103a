"""Text in other encodings than UTF-8, and files that are no text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan import catalog
from memconsole.plan.catalog import folders
from memconsole.plan.catalog.folders import folder
from memconsole.plan.check import check
from memconsole.plan.data.check_records import check_records
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.data.inspect import inspect
from memconsole_trainer.data.sources.documents import DataError, FileDocuments
from memconsole_trainer.data.sources.opening import open_source
from memconsole_trainer.tasks.language import open_data
from tests.unit.data.quiet import Quiet

WORDS = "Grüße, 日本 \U0001f600 und naïve Wörter.\n\n" * 300
ENCODINGS = ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]


def plan(source: Path, **changes: Any) -> Plan:
    small = {"model.name": "stories", "model.target_params": 100_000, "data.vocab_size": 300}
    return replace(Plan(), {**small, "data.source": str(source), "device.name": "cpu", **changes})


def opened(source: Path) -> FileDocuments:
    found = open_source(plan(source), 300)
    assert isinstance(found, FileDocuments)
    return found


def texts(source: FileDocuments) -> list[str]:
    return source.read(0, source.count or 0)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("between", ["\n\n", "\n", " ", ""])
def test_a_byte_order_mark_tells_utf_16_and_utf_32(
    encoding: str, between: str, tmp_path: Path
) -> None:
    words = WORDS.replace("\n\n", between) if between else "日\U0001f600本" * 3000
    path = tmp_path / "a.txt"
    path.write_bytes(("\ufeff" + words).encode(encoding))
    check(plan(path))
    found = opened(path)
    assert "".join(texts(found)) == words
    assert (found.count or 0) > 5
    assert all(text.endswith(between) for text in texts(found)[:-1])
    (tmp_path / "b.txt").write_text("and UTF-8")
    assert texts(opened(tmp_path))[-1] == "and UTF-8"
    assert "".join(texts(opened(tmp_path))[:-1]) == words


def test_the_fingerprint_tells_a_text_from_the_same_bytes_as_older_runs_read_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.txt"

    def older() -> str:
        data = path.read_bytes()
        return hashlib.sha256(f"a.txt\0{[0, len(data)]}\0".encode() + data).hexdigest()

    for encoding in ("utf-16-le", "utf-8"):
        path.write_bytes("\ufeffwords".encode(encoding))
        assert opened(path).fingerprint != older()
    path.write_text("words")
    assert opened(path).fingerprint == older()


@pytest.mark.parametrize("encoding", ["utf-8", *ENCODINGS])
def test_the_mark_that_begins_a_file_is_no_text(encoding: str, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(f"\ufeff\ufeff{name}".encode(encoding))
    assert texts(opened(tmp_path)) == ["\ufeffa", "\ufeffb"]
    path = tmp_path / "lone.txt"
    path.write_bytes(("\ufeff" + "\ufeffone\n\n" * 400).encode(encoding))
    found = texts(opened(path))
    assert len(found) > 1
    assert "".join(found) == "\ufeffone\n\n" * 400


def test_binary_files_of_a_folder_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("some words")
        (tmp_path / f"{number}.log").write_bytes(b"\x7fELF\0\1\2")
    found = folder(tmp_path)
    assert found is not None
    assert found.words == "takes 3 text files (30 B), leaves out 3 binary"
    assert texts(opened(tmp_path)) == ["some words"] * 3
    monkeypatch.setattr(folders, "MOST_HEADS", 2)
    assert (few := folder(tmp_path, 100)) is not None
    assert few.left_out == (("binary", 1),)
    for number in range(3):
        (tmp_path / f"{number}.txt").unlink()
    with pytest.raises(PlanError, match="holds no text files"):
        folder(tmp_path)


class _Told(Quiet):
    def __init__(self) -> None:
        self.said: list[str] = []

    def warning(self, message: str) -> None:
        self.said.append(message)


@pytest.mark.parametrize("kind", ["file", "folder", "lines", "records"])
def test_bytes_that_are_no_utf_8_are_counted_once(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"data.cache_gib": 0}
    if kind in ("lines", "records"):
        path = tmp_path / "a.jsonl"
        row = json.dumps({"text": "schöne Wörter"}, ensure_ascii=False).encode("latin-1")
        path.write_bytes(b"\n".join([row] * 40))
        changes |= {"data.template": "={{ text }}"} if kind == "records" else {}
        told, number = "40 of 40 documents", 80
    elif kind == "folder":
        path = tmp_path / "a"
        path.mkdir()
        for name in range(40):
            (path / f"{name:02}.txt").write_bytes("schöne Wörter\n".encode("latin-1") * 5)
        (path / "a.txt").write_text("schöne Wörter\n" * 5)
        told, number = "40 of 41 documents", 400
    else:
        path = tmp_path / "a.txt"
        path.write_bytes(b"words \xff\xfe\xfd\n" + b"more words\n" * 500)
        told, number = f"1 of {opened(path).count} documents", 3
    made = plan(path, **changes)
    words = (
        f"{path}: {told} hold {number} U+FFFD, in place of bytes that are not UTF-8, or of half an escaped pair "
        "(\\ud800); save the text as UTF-8"
    )
    teller = _Told()
    open_data(made, catalog.model(made), tmp_path, teller, {})
    assert [said for said in teller.said if "UTF-8" in said] == [words]
    assert inspect(made).warning == words


def test_utf_8_is_not_warned_of(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeff" + WORDS)
    assert inspect(plan(tmp_path / "a.txt")).warning == ""


@pytest.mark.parametrize(("empty", "warned"), [(3, False), (5, True)])
def test_many_documents_without_text_are_warned_of(
    empty: int, warned: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"body": "x"}] * empty + [{"text": "some words"}] * (40 - empty)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"{path}: {empty} of 40 documents hold no text; they are not learned"
    assert inspect(plan(path)).warning == (words if warned else "")


def test_a_table_in_utf_16_is_refused_before_launch_and_one_in_latin_1_is_read(
    tmp_path: Path,
) -> None:
    wide, latin = tmp_path / "wide.csv", tmp_path / "latin.csv"
    wide.write_bytes("text,note\ncafé,1\n".encode("utf-16"))
    latin.write_bytes(b"text,note\n" + "café,1\n".encode("latin-1") * 20)
    lines = tmp_path / "wide.jsonl"
    lines.write_bytes('{"text": "café"}\n'.encode("utf-16"))
    for path in (wide, lines):
        with pytest.raises(PlanError, match="is UTF-16-LE; save it as UTF-8"):
            check_records(replace(Plan(), {"data.source": str(path)}))
    with pytest.raises(DataError, match=r"wide\.csv: is UTF-16-LE; save it as UTF-8"):
        inspect(replace(Plan(), {"data.source": str(wide)}))
    plan = replace(Plan(), {"data.source": str(latin)})
    check_records(plan)
    source = open_source(plan, 300)
    assert source.read(0, 1)[0] == "caf\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ratings_in_utf_16_or_utf_32_are_refused(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text("\ufeffuser,item\n1,2\n1,3\n", encoding)
    made = replace(catalog.preset("efficientids"), {"data.source": str(path)})
    with pytest.raises(PlanError, match=r"ratings\.csv: is UTF-16 or UTF-32; save it as UTF-8"):
        check(made)
    assert inspect(made).problem == f"{path}: is UTF-16 or UTF-32; save it as UTF-8"


def test_a_header_that_no_table_has_is_left_to_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("text," + "x" * 200_000 + "\na,b\n")
    check_records(replace(Plan(), {"data.source": str(path)}))
