"""Completes paths as they are typed. Only names are read, never a file's contents."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

MOST = 200
"""Names that are offered at most."""
MOST_READ = 5000
"""Entries of a folder that are looked at."""


def looks_like_path(text: str) -> bool:
    """Whether a typed word is the beginning of a path rather than of a name."""
    return text.startswith(("/", "~", ".")) or ("/" in text and "://" not in text)


def completions(text: str, suffixes: Sequence[str] = ()) -> list[str]:
    """What the path `text` can become, folders first and with a slash at their end, as it was typed.

    With `suffixes`, only such files. Hidden entries are offered once their dot is typed.
    """
    begun = text.rpartition("/")[2]
    folder = text[: len(text) - len(begun)]
    try:
        place = Path(folder or ".").expanduser()
        found: list[tuple[bool, str]] = []
        with os.scandir(place) as entries:
            for seen, entry in enumerate(entries):
                if seen >= MOST_READ:
                    break
                name = entry.name
                if not name.startswith(begun) or (name.startswith(".") and not begun):
                    continue
                is_folder = entry.is_dir()
                if is_folder or not suffixes or Path(name).suffix.lower() in suffixes:
                    found.append((not is_folder, name + "/" * is_folder))
    except (OSError, ValueError, RuntimeError):
        return []
    return [folder + name for _, name in sorted(found)[:MOST] if name.isprintable()]


def completed(text: str, suffixes: Sequence[str] = ()) -> str:
    """`text` with everything added that all its completions agree on."""
    found = completions(text, suffixes)
    if not found:
        return text
    low, high = min(found), max(found)  # all others lie between them, letter by letter
    same = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return max(low[:same], text, key=len)
