"""Counts that took a while, kept on disk under a name."""

from __future__ import annotations

import msgspec

from memconsole import regular_file, typed_json
from memconsole.private_files import keep
from memconsole.user_folders import cache_folder

FILE_BYTES = 1 << 10


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted."""

    count: int


def read_count(name: str) -> int | None:
    """The count that was kept as `name`; None if there is none. Damaged files are ignored."""
    try:
        file = cache_folder() / "counted" / f"{name}.json"
        stored = typed_json.decode(regular_file.read(file, FILE_BYTES), Counted)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return stored.count if stored.count > 0 else None


def write_count(name: str, count: int) -> None:
    """Keep a count as `name`. Raises `OSError`."""
    file = cache_folder() / "counted" / f"{name}.json"
    keep(file, msgspec.json.encode(Counted(count=count)))
