"""Completes paths as they are typed. Only names are read, never a file's contents."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

MOST = 200
"""The most names that are offered."""
MOST_READ = 5000
"""The most entries of a folder that are read."""
ONLY_FOLDERS = ("/",)
"""Suffixes that no file has."""


def looks_like_path(text: str) -> bool:
    """Whether a typed word is the beginning of a path rather than of a name."""
    return text.startswith(("/", "~", ".")) or ("/" in text and "://" not in text)


def completions(text: str, suffixes: Sequence[str] = ()) -> list[str]:
    """The paths that begin with `text`, written as it was typed; folders come first and end with a slash.

    With `suffixes`, only such files. Hidden entries are offered once their dot is typed.
    """
    beginning = text.rpartition("/")[2]
    folder = text[: len(text) - len(beginning)]
    try:
        place = Path(folder or ".").expanduser()
        matches: list[tuple[bool, str]] = []
        with os.scandir(place) as entries:
            for seen, entry in enumerate(entries):
                if seen >= MOST_READ:
                    break
                name = entry.name
                if not name.startswith(beginning) or (name.startswith(".") and not beginning):
                    continue
                is_folder = entry.is_dir()
                if is_folder or not suffixes or Path(name).suffix.lower() in suffixes:
                    matches.append((not is_folder, name + "/" * is_folder))
    except (OSError, ValueError, RuntimeError):
        return []
    return [folder + name for _, name in sorted(matches)[:MOST] if name.isprintable()]


def completed(text: str, suffixes: Sequence[str] = ()) -> str:
    """`text` extended by what all its completions have in common."""
    paths = completions(text, suffixes)
    if not paths:
        return text
    low, high = min(paths), max(paths)  # what these two share, all share
    same = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return max(low[:same], text, key=len)
