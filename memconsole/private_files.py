"""Makes files and folders that only this user can read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def keep(path: Path, content: bytes) -> None:
    """Replace a file of the cache atomically, for this user alone. Raises `OSError`."""
    private_folder(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def private_folder(path: Path) -> None:
    """Make `path` and the parents it lacks, for this user alone, whatever the umask. Raises
    `OSError`.

    `Path.mkdir` gives its mode to the last folder only.
    """
    lacking = [path]
    while not lacking[-1].parent.exists():
        lacking.append(lacking[-1].parent)
    for folder in reversed(lacking):
        folder.mkdir(mode=0o700, exist_ok=True)
