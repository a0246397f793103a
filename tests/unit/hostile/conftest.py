"""What the tests of hostile files share: nothing may wait."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

SECONDS = 20
"""Far more than any of these tests takes."""


@pytest.fixture(autouse=True)
def _nothing_waits() -> Iterator[None]:
    """Interrupt a test that waits for the other end of a pipe, or reads a device for ever."""

    def late(number: int, frame: FrameType | None) -> NoReturn:
        raise AssertionError("this waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _folder(path: Path) -> None:
    path.mkdir()


def _device(path: Path) -> None:
    """A link, because only the superuser can make a device."""
    path.symlink_to("/dev/zero")


def _dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _huge(path: Path) -> None:
    """A sparse file of a terabyte."""
    path.touch()
    os.truncate(path, 1 << 40)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a folder": _folder,
    "a named pipe": os.mkfifo,
    "a device": _device,
    "nothing": _dangling,
    "a loop": _loop,
    "a terabyte": _huge,
}
"""What may stand where a small file should be, and how to put it there."""


@pytest.fixture(params=NO_FILES)
def no_file(request: pytest.FixtureRequest) -> Callable[[Path], Path]:
    """Puts something in the place of a file."""

    def put(path: Path) -> Path:
        if path.exists():
            path.unlink()
        NO_FILES[request.param](path)
        assert request.param == "a terabyte" or not stat.S_ISREG(path.lstat().st_mode)
        return path

    return put
