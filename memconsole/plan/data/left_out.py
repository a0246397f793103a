"""What a plan reads of its folders of data, and what it leaves out, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from memconsole.plan import catalog
from memconsole.plan.catalog.folders import Folder, known_folder
from memconsole.plan.data.mixture import sources
from memconsole.plan.plan import Plan, printable

Reader = Callable[[Path], Folder | None]


def left_out(plan: Plan, read: Reader = known_folder) -> tuple[str, ...]:
    """One sentence for each folder of which something is left out, or that holds several splits. By default, a folder with too many
    entries for the console to read gets no sentence. Raises `PlanError`."""
    return tuple(f"{printable(name)} {found.words}" for name, found in _folders(plan, read))


def left_out_shortly(plan: Plan) -> str:
    """A few words for a narrow place; empty if there is nothing to say. Raises `PlanError`."""
    folders = [files for _, files in _folders(plan, known_folder)]
    count = sum(number for files in folders for _, number in files.left_out)
    phrases = [f"{count:,} left out"] if count else []
    phrases += ["several splits"] if any(files.splits for files in folders) else []
    return ", ".join(phrases)


def _folders(plan: Plan, read: Reader) -> Iterator[tuple[str, Folder]]:
    """Name and files of each folder of which there is something to say."""
    for source in sources(plan):
        entry = catalog.dataset(source)
        files = read(Path(entry.where)) if entry.format == "directory" else None
        if files is not None and files.words:
            yield entry.label, files
