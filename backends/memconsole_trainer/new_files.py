"""Files and folders that appear when they are complete: nothing is left of one that is interrupted or has no room."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that only writing has. Python does not say for which file."""


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

    `out` is made if it is missing. Raises `FileExistsError` if it holds anything, and OSError.
    """
    made = not os.path.lexists(out)
    complete = False
    try:
        part = _inside(out)
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
    finally:
        if made and not complete:
            with suppress(OSError):
                out.rmdir()


def _inside(out: Path) -> Path:
    """A new folder in `out`: beside `out` there may be another disk, or no right to write."""
    try:
        held = out.is_dir() and any(out.iterdir())
        if not held:
            out.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=".part-", dir=out))
    except OSError as error:
        raise OSError(f"{out}: cannot be made: {error.strerror}") from None
    raise FileExistsError(f"{out}: exists and is not empty")


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
    """Without ctrl+c."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
