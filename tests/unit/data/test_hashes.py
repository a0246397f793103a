"""The hashes of what was read tell changed data from the same data, at little cost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.plan.plan import DataChoice
from memconsole_trainer.data.sources import hashes
from memconsole_trainer.data.sources.hashes import BlockHashes
from memconsole_trainer.data.sources.opening import open_path
from memconsole_trainer.data.windows.file import WindowFile

LINES = [f"line {i} of some text that is long enough to be cut\n" for i in range(4000)]


def write_text(path: Path, changed: int | None) -> None:
    lines = [line.upper() if i == changed else line for i, line in enumerate(LINES)]
    path.write_text("".join(lines))


def write_table(path: Path, changed: int | None) -> None:
    lines = [line.upper() if i == changed else line for i, line in enumerate(LINES)]
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))


def write_tokens(path: Path, changed: int | None) -> None:
    tokens = np.arange(4000 * 300).reshape(4000, 300) % 290
    if changed is not None:
        tokens[changed, 7] += 1
    path.unlink(missing_ok=True)  # it may be open
    with h5py.File(path, "w") as file:
        file["tokens"] = tokens.astype(np.int32)


def write_texts(path: Path, changed: int | None) -> None:
    lines = [line.upper() if i == changed else line for i, line in enumerate(LINES)]
    path.unlink(missing_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("text", data=lines, chunks=(500,))


WRITERS = [
    pytest.param(write_text, "data.txt", id="text"),
    pytest.param(write_table, "data.jsonl", id="jsonl"),
    pytest.param(write_tokens, "data.h5", id="tokens"),
    pytest.param(write_texts, "texts.h5", id="texts"),
]


def opened(path: Path) -> Any:
    return open_path(path, "text", 300, DataChoice())


def read_some(source: Any, share: float = 1.0) -> None:
    """Read the first blocks, as training reads them."""
    read = getattr(source, "rows", None) or source.read
    for start in range(0, int(source.count * share), source.block_size):
        read(start, min(start + source.block_size, source.count))


def stored(source: Any) -> Any:
    return json.loads(json.dumps(source.hashes.state()))


@pytest.mark.parametrize(("write", "name"), WRITERS)
def test_one_changed_row_far_from_the_beginning_is_found(
    write: Callable[[Path, int | None], None], name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    write(path, None)
    time = path.stat().st_mtime_ns
    first = opened(path)
    read_some(first)
    state = stored(first)
    assert opened(path).hashes.difference(state, lambda: None) == ""
    os.utime(path, ns=(time + 10**9, time + 10**9))
    assert opened(path).hashes.difference(state, lambda: None) == ""  # all of it is the same
    write(path, 2900)
    os.utime(path, ns=(time + 2 * 10**9, time + 2 * 10**9))
    assert opened(path).fingerprint == first.fingerprint
    assert "is not the same" in opened(path).hashes.difference(state, lambda: None)


@pytest.mark.parametrize("name", ["data.txt", "data.h5"])
def test_a_row_changed_under_an_old_time_is_found(name: str, tmp_path: Path) -> None:
    path, write = tmp_path / name, write_text if name.endswith("txt") else write_tokens
    write(path, None)
    status, first = path.stat(), opened(path)
    read_some(first)
    write(path, 2900)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert "is not the same" in opened(path).hashes.difference(stored(first), lambda: None)


@pytest.mark.parametrize(("write", "name"), WRITERS[:3])
def test_a_change_of_what_was_not_read_yet_is_found_by_its_time(
    write: Callable[[Path, int | None], None], name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    write(path, None)
    time = path.stat().st_mtime_ns
    first = opened(path)
    read_some(first, 0.5)
    assert opened(path).hashes.difference(stored(first), lambda: None) == ""
    write(path, 3500)
    os.utime(path, ns=(time + 10**9, time + 10**9))
    assert opened(path).fingerprint == first.fingerprint
    assert "not all" in opened(path).hashes.difference(stored(first), lambda: None)


@pytest.mark.parametrize("part", ["input_sequences", "controls", "control_masks", "trajectory_ids"])
def test_a_changed_number_of_any_dataset_of_windows_is_found(part: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "input_sequences": draw.normal(size=(3000, 8, 19)).astype(np.float32),
        "controls": draw.normal(size=(3000, 6)).astype(np.float32),
        "control_masks": np.ones((3000, 6), np.float32),
        "trajectory_ids": np.arange(3000) // 20,
    }

    def written() -> WindowFile:
        (tmp_path / "w.h5").unlink(missing_ok=True)
        with h5py.File(tmp_path / "w.h5", "w") as file:
            for name, values in arrays.items():
                file.create_dataset(name, data=values, chunks=(50, *values.shape[1:]))
        return WindowFile(tmp_path / "w.h5", 19, 6, 8, None)

    first = written()
    first.groups(0, first.count)
    for start in range(0, first.count, first.block_rows):
        first.read(start, min(start + first.block_rows, first.count))
    state = json.loads(json.dumps(first.hashes.state()))
    assert written().hashes.difference(state, lambda: None) == ""
    arrays[part][2700] += 1
    changed = written()
    assert changed.fingerprint == first.fingerprint
    assert "is not the same" in changed.hashes.difference(state, lambda: None)


@given(st.integers(1, 40), st.data())
def test_attempts_that_read_any_blocks_find_any_change_of_them(count: int, data: Any) -> None:
    blocks = [b"%d" % i for i in range(count)]
    some = st.lists(st.integers(0, count - 1))
    first = BlockHashes(count, lambda i: (blocks[i],))
    for index in data.draw(some):
        first.take(index, (blocks[index],))
    second = BlockHashes(count, lambda i: (blocks[i],))
    for index in data.draw(some):
        second.take(index, (blocks[index],))
    read = {i for i in range(count) if first._own[i] or second._own[i]}
    assert second.check(first.state(), None, lambda: None) != "changed"
    changed = data.draw(st.integers(0, count - 1))
    blocks[changed] += b"!"
    third = BlockHashes(count, lambda i: (blocks[i],))
    found = third.check(second.state(), None, lambda: None)
    assert (found == "changed") == (changed in read)


def test_a_large_source_shares_hashes_and_is_read_again_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hashes, "GROUPS", 10)
    asked: list[int] = []

    def content(index: int) -> tuple[bytes]:
        asked.append(index)
        return (b"%06d" % index,)

    first = BlockHashes(1005, content)
    for index in range(0, 1005, 3):
        first.take(index, content(index))
    state = first.state()
    assert len(json.dumps(state)) < 400
    asked.clear()
    second = BlockHashes(1005, content)
    assert second.check(state, 6 * 60, lambda: None) == ""
    assert 60 <= len(asked) < 120
    assert max(asked) - min(asked) > 200  # spread over the source
    for index in range(0, 1005, 2):
        second.take(index, content(index))
    third = BlockHashes(1005, content)
    asked.clear()
    third.check(second.state(), None, lambda: None)
    assert set(asked) == set(range(0, 1005, 3)) | set(range(0, 1005, 2))


def test_blocks_exchanged_and_blocks_read_again_after_a_change_are_told() -> None:
    blocks = [b"first", b"second"]
    reader = BlockHashes(2, lambda i: (blocks[i],))
    for index in (0, 1):
        reader.take(index, (blocks[index],))
    state = reader.state()
    blocks.reverse()
    assert BlockHashes(2, lambda i: (blocks[i],)).check(state, None, lambda: None) == "changed"
    reader.take(0, (b"first",))
    assert not reader.changed
    reader.take(0, (b"another",))
    assert reader.changed
    assert reader.state() == state  # what was read first counts
