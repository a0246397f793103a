"""What a file holds is read once for each of its versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memconsole.once_per_version import once_per_version


def test_a_file_is_read_again_when_its_size_or_its_time_changes(tmp_path: Path) -> None:
    file, read = tmp_path / "file", []

    @once_per_version(4)
    def content(path: Path, ending: str = "") -> str:
        read.append(path)
        return path.read_text() + ending

    def written(text: str, time: int) -> None:
        file.write_text(text)
        os.utime(file, (time, time))

    written("one", 1)
    assert [content(file), content(file)] == ["one", "one"]
    assert len(read) == 1
    assert content(file, "!") == "one!"  # other arguments have answers of their own
    written("two", 2)
    assert content(file) == "two"
    written("three", 2)
    assert content(file) == "three"
    assert len(read) == 4
    file.unlink()
    with pytest.raises(FileNotFoundError):
        content(file)


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    file, failures = tmp_path / "file", [ValueError("damaged")]
    file.touch()

    @once_per_version(4)
    def content(path: Path) -> str:
        if failures:
            raise failures.pop()
        return "whole"

    with pytest.raises(ValueError, match="damaged"):
        content(file)
    assert content(file) == "whole"
