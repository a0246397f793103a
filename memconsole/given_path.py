"""Paths as a person writes them."""

from __future__ import annotations

import os
from pathlib import Path


def given_path(text: str | Path) -> Path:
    """The path that was written, with ``~`` as a home folder. That of a user who does not exist stays as it is, so that no
    file is found there. Ask `os.path.isfile` and its like about it: they answer for names that no file can have, and
    for folders that may not be entered, where methods of `Path` raise."""
    return Path(os.path.expanduser(text))
