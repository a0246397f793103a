"""Files and folders appear when they are complete, and nothing is left of those that are not."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from memconsole_trainer import new_files
from memconsole_trainer.new_files import new_file, new_folder
from memconsole_trainer.weights.export import save


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file may become larger than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_file(out) as part:
        part.write_text("new")
        assert not out.exists()
    assert (out.read_text(), names(tmp_path)) == ("new", ["out"])


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with new_file(link) as part:
        part.write_text("new")
    assert link.is_symlink()
    assert (target.read_text(), names(tmp_path)) == ("new", ["far", "link", "target"])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")])
def test_nothing_is_left_of_what_is_not_complete(tmp_path: Path, error: BaseException) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()

    def half(path: Path) -> None:
        path.write_text("half")
        raise error

    with pytest.raises(type(error)), new_file(tmp_path / "out") as part:
        half(part)
    for out in (tmp_path / "new", empty):
        with pytest.raises(type(error)), new_folder(out) as folder:
            half(folder / "a")
    assert names(tmp_path) == ["empty"]


def test_a_folder_is_filled_when_its_files_are_complete(tmp_path: Path) -> None:
    empty, link = tmp_path / "empty", tmp_path / "link"
    empty.mkdir()
    link.symlink_to(empty)
    number = empty.stat().st_ino
    for out in (tmp_path / "one" / "two", link):
        with new_folder(out) as folder:
            (folder / "a").write_text("a")
            assert not (out / "a").exists()
        assert names(out) == ["a"]
    assert link.is_symlink()
    assert empty.stat().st_ino == number, "a shell or a mount may be there"


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(FileExistsError, match="not empty"), new_folder(tmp_path):
        pass
    assert names(tmp_path) == ["mine"]


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_kept(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    half = "from memconsole_trainer.new_files import new_folder; from pathlib import Path; import os, sys\n"
    half += (
        "with new_folder(Path(sys.argv[1])) as part: (part / 'a').touch(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", half, str(out)]).returncode == -9
    assert len(names(out)) == 2
    with new_folder(out) as part:
        assert names(out) == [part.name]
        with pytest.raises(FileExistsError, match="not empty"):
            new_folder(out).__enter__()
        (part / "b").touch()
    assert names(out) == ["b"]


def test_a_folder_that_cannot_be_made_or_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    below, out = tmp_path / "file" / "out", tmp_path / "out"
    with (
        pytest.raises(OSError, match=f"^{below}: cannot be made: Not a directory$"),
        new_folder(below),
    ):
        pass

    def forbidden(**_: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(new_files.tempfile, "mkdtemp", forbidden)
    with pytest.raises(OSError, match=f"^{out}: cannot be made: Permission denied$"):
        new_folder(out).__enter__()
    assert names(tmp_path) == ["file"]


def test_a_full_disk_is_one_line_that_names_the_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    expected = f"^{out}: cannot be written: File too large$"
    with room(1000):
        with pytest.raises(OSError, match=expected), new_file(out) as part:
            part.write_bytes(bytes(2000))
        with pytest.raises(OSError, match=expected), new_folder(out) as folder:
            save({"a": np.zeros(1000, np.float32)}, folder / "weights.safetensors")
    assert names(tmp_path) == []


def test_an_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(FileNotFoundError, match=str(absent)), new_file(tmp_path / "out"):
        absent.read_text()
