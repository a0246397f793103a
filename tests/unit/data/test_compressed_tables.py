"""Compressed tables: the same records as those of the plain file, and damage told by name."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from memconsole.plan import catalog
from memconsole.plan.data.check_records import check_records
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.data import disk_cache
from memconsole_trainer.data.inspect import inspect
from memconsole_trainer.data.sources import unpacked
from memconsole_trainer.data.sources.documents import DataError, NoRoomError
from memconsole_trainer.data.sources.opening import open_source

ROWS = [{"text": f"row {number}", "n": number, "answer": "yes"} for number in range(400)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def zstandard(data: bytes) -> bytes:
    out = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    found: bytes = out.getvalue().to_pybytes()
    return found


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard,
}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(path: Path, **changes: Any) -> Plan:
    return replace(
        Plan(), {"data.source": str(path), **{f"data.{k}": v for k, v in changes.items()}}
    )


def opened(path: Path, **changes: Any) -> Any:
    return open_source(plan(path, **changes), 300)


@pytest.mark.parametrize("suffix", PACK)
def test_a_compressed_file_holds_what_the_plain_one_holds(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    # Two members, one after the other, are one file, as `cat a.gz b.gz` makes it.
    half = len(LINES) // 2
    path.write_bytes(PACK[suffix](LINES[:half]) + PACK[suffix](LINES[half:]))
    records = opened(path, template="{{ text }}: {{ n }}")
    assert records.read(0, 400) == [f"row {n}: {n}" for n in range(400)]
    assert records.hashes.files == [path]
    if suffix in (".gz", ".zst"):
        assert opened(path).read(398, 400) == ["row 398", "row 399"]
        assert inspect(plan(path)).columns == ("text string", "n int64", "answer string")
    unpacked._HELD.clear()
    path.touch()
    assert opened(path, template="{{ n }}").read(7, 8) == ["7"]


def test_a_folder_of_compressed_files_is_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    (folder / "b.jsonl").write_bytes(LINES)
    assert opened(folder, template="{{ n }}").count == 800
    entry = catalog.dataset(plan(folder / "a.jsonl.gz"))
    assert entry.format == "jsonl"
    assert entry.bytes_per_token == 1.2


def test_the_console_refuses_what_the_first_record_shows(tmp_path: Path) -> None:
    for suffix in (".gz", ".bz2", ".xz"):
        path = tmp_path / f"rows.jsonl{suffix}"
        path.write_bytes(PACK[suffix](LINES))
        check_records(plan(path))
        with pytest.raises(PlanError, match='no column "words"'):
            check_records(plan(path, text_column="words"))
        path.write_bytes(PACK[suffix](b'{"n": "a secret", "m": null}\n' + LINES))
        check_records(plan(path))
        with pytest.raises(PlanError) as error:
            check_records(plan(path, text_column="words"))
        assert "one of: n, m, text, answer; or" in str(error.value)
        path.write_bytes(PACK[suffix](LINES)[:40])
        check_records(plan(path))  # damage is told by the trainer
    (tmp_path / "words.txt.gz").write_bytes(gzip.compress(b"some words"))
    with pytest.raises(PlanError, match=r"\.gz is not text.*tables may be compressed"):
        catalog.dataset(plan(tmp_path / "words.txt.gz"))


@pytest.mark.parametrize("suffix", PACK)
def test_damage_is_one_line_with_the_name_and_leaves_nothing(suffix: str, tmp_path: Path) -> None:
    whole = PACK[suffix](LINES)
    for name, content in {
        "cut": whole[: len(whole) // 2],
        "changed": whole[:30] + bytes([whole[30] ^ 255]) + whole[31:],
        "other": b"no such compression" * 9,
    }.items():
        path = tmp_path / f"{name}.jsonl{suffix}"
        path.write_bytes(content)
        with pytest.raises(DataError) as refused:
            opened(path, template="{{ n }}")
        assert str(refused.value).startswith(f"{path}: cannot be unpacked")
        assert "\n" not in str(refused.value)
        unpacked._HELD.clear()
    left = [p.name for p in disk_cache.root().rglob("*") if p.is_file()]
    assert set(left) <= {disk_cache.LOCK}


def test_a_bad_line_is_named_as_a_line_of_the_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(LINES[: LINES.index(b"\n") + 1] + b"[1, 2]\n"))
    for changes in ({"template": "{{ n }}"}, {}):
        with pytest.raises(DataError) as refused:
            opened(path, **changes).read(0, 2)
        assert str(refused.value).startswith(f"{path}: line 2: holds no object")


def test_room_is_made_before_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(LINES))
    old = disk_cache.root() / "old"
    held = disk_cache.lock(old)
    assert held is not None
    (old / "tokens").write_bytes(bytes(1000))
    os.close(held)
    monkeypatch.setattr(disk_cache, "SPARED_BYTES", 1 << 62)
    with pytest.raises(NoRoomError, match=r"rows\.jsonl\.gz: cannot be unpacked into .*no room"):
        opened(path, template="{{ n }}")
    assert not old.exists()
