"""Files and folders that appear when they are complete: nothing is left of one that is interrupted or has no room."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that only writing has. Python does not say for which file."""
_PART = re.compile(r"\.part-[a-z0-9_]{8}")
"""The name of a folder in a folder that is not complete."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def new_file(output: Path) -> Iterator[Path]:
    """A path for a new file, which becomes `output` if nothing is raised. If `output` is a link, what it leads to is
    replaced. Raises OSError."""
    target = Path(os.path.realpath(output))
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with _named(output, part):
            yield part
            os.replace(part, target)
    finally:
        with _undisturbed():
            part.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder for new files, which move to the folder `out` if nothing is raised.

    `out` is made if it is missing. What a killed process left in it is removed. Raises `FileExistsError` if it holds
    anything else, and OSError.
    """
    made = not os.path.lexists(out)
    complete = False
    try:
        part, lock = _inside(out)
        try:
            with _named(out, part):
                yield part
                with _undisturbed():
                    for path in list(part.iterdir()):
                        os.rename(path, out / path.name)
                    complete = True
        finally:
            with _undisturbed():
                shutil.rmtree(part, ignore_errors=True)
                os.close(lock)
    finally:
        if made and not complete:
            with suppress(OSError):
                out.rmdir()


def _inside(out: Path) -> tuple[Path, int]:
    """A new folder in `out`: beside `out` there may be another disk, or no right to write. The descriptor locks `out`:
    a folder of another process is removed only if that process has ended."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not _cleared(out, lock):
                raise FileExistsError(f"{out}: exists and is not empty")
            return Path(tempfile.mkdtemp(prefix=".part-", dir=out)), lock
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        if error.strerror is None:  # the sentence above
            raise
        raise OSError(f"{out}: cannot be made: {error.strerror}") from None


def _cleared(out: Path, lock: int) -> bool:
    """Whether `out` is empty, or was but for what killed processes left."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except BlockingIOError:
        return False  # another process writes to it
    except OSError:
        locked = False  # the file system has no locks
    left = list(out.iterdir())
    if left and not (locked and all(_PART.fullmatch(path.name) and path.is_dir() for path in left)):
        return False
    for path in left:
        shutil.rmtree(path)
    return True


@contextmanager
def _named(output: Path, part: Path) -> Iterator[None]:
    """Errors of writing to `part` name `output`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            own = error.errno in _NO_ROOM
        else:
            own = Path(os.fsdecode(error.filename)).is_relative_to(part)
        if not own:
            raise
        raise OSError(f"{output}: cannot be written: {error.strerror}") from None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without ctrl+c and other signals that end a process."""
    before = [signal.signal(number, signal.SIG_IGN) for number in _ENDING]
    try:
        yield
    finally:
        for number, handler in zip(_ENDING, before, strict=True):
            signal.signal(number, handler)
