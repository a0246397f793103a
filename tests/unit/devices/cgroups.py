"""Control groups as files of a folder that stands for the root of the system."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def version_2(root: Path, group: str, limit: str, current: int, inactive: int) -> None:
    folder = root / "sys/fs/cgroup" / group
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{current}\n")
    write(folder / "memory.stat", f"anon 5\nfile 9\ninactive_anon 1\ninactive_file {inactive}\n")
