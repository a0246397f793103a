"""Records what is done in a folder, and makes the states in which a power cut may leave it.

After a power cut a file system has what was synced: the content of a file, the names in a folder. Of
what was changed since, it may have any part: names without content, content without names, some of
several renames, half of what was written. Method: Pillai et al., "All File Systems Are Not Created
Equal", OSDI 2014.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

_CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.symlink", "os.link"}
"""Python's audit events before names change; `open` is another one."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ALL_SUBSETS = 5
"""Of so many changes every subset is tried; of more, beginnings and what lacks or has one."""
ROOT = 0

Tree = dict[str, bytes | str | None]
"""What a folder holds, by path: a file's content, where a link points, None for a folder."""


@dataclass
class Change:
    """Names that changed together: (folder, name, what it stands for now). A rename is one change."""

    names: tuple[tuple[int, str, int | None], ...]
    made: int
    """The first moment that has it."""
    durable: int | None = None
    """The first moment since which it is synced."""


@dataclass(frozen=True)
class Moment:
    """What a power cut at this moment may leave."""

    number: int
    before: str
    """What was about to be done."""
    promise: Any
    """What the recorded program had promised by then."""
    written: dict[int, bytes]
    """Content of each file, as a reader sees it."""
    synced: dict[int, bytes]
    """Content of each file when it was last synced."""


@dataclass
class Recorder:
    """The history of one folder. `promise` is set by the program that is recorded."""

    root: Path
    promise: Any = None
    syncs: bool = True
    """Whether syncing has an effect. Without, the tests have to find something lost."""
    changes: list[Change] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    links: dict[int, str] = field(default_factory=dict)
    folders: set[int] = field(default_factory=lambda: {ROOT})

    def __post_init__(self) -> None:
        self._now: dict[int, dict[str, int]] = {ROOT: {}}
        self._ids: dict[int, int] = {os.stat(self.root).st_ino: ROOT}
        self._next = 1
        self._stamps: dict[int, tuple[int, ...]] = {}
        self._written: dict[int, bytes] = {}
        self._synced: dict[int, bytes] = {}
        self._lock = threading.RLock()

    def moment(self, before: str) -> None:
        """Note how the folder is."""
        with self._lock:
            found: dict[int, dict[str, int]] = {}
            inodes = {os.stat(self.root).st_ino: ROOT}
            self._look(self.root, ROOT, found, inodes)
            names = []
            for folder in found.keys() | self._now.keys():
                old, new = self._now.get(folder, {}), found.get(folder, {})
                for name in sorted(old.keys() | new.keys()):
                    if old.get(name) != new.get(name) and (folder in found or folder == ROOT):
                        names.append((folder, name, new.get(name)))
            number = len(self.moments)
            if names:
                # What the audit events announce is one change at a time.
                assert len({one for _, _, one in names} - {None}) <= 1, (before, names)
                self.changes.append(Change(tuple(names), number))
            self._now, self._ids = found, inodes
            self.moments.append(
                Moment(number, before, self.promise, dict(self._written), dict(self._synced))
            )

    def sync(self, descriptor: int) -> None:
        """Note that a file or folder was synced."""
        with self._lock:
            one = self._ids.get(os.fstat(descriptor).st_ino)
            if one is None or not self.syncs:
                return
            if one in self.folders:
                for change in self.changes:
                    if change.durable is None and any(f == one for f, _, _ in change.names):
                        change.durable = len(self.moments)
            else:
                self._synced[one] = self._written[one]

    def holds(self, path: Any, folder: Any = None) -> bool:
        """Whether a path of an audit event lies in the folder."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        name = os.fsdecode(path)
        if isinstance(folder, int) and folder >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        return os.path.abspath(name).startswith(f"{self.root}/")

    def _look(
        self, path: Path, one: int, found: dict[int, dict[str, int]], inodes: dict[int, int]
    ) -> None:
        found[one] = {}
        for entry in os.scandir(path):
            status = entry.stat(follow_symlinks=False)
            number = inodes.get(status.st_ino, self._ids.get(status.st_ino))
            if number is None:
                number, self._next = self._next, self._next + 1
            inodes[status.st_ino] = number
            found[one][entry.name] = number
            if entry.is_dir(follow_symlinks=False):
                self.folders.add(number)
                self._look(path / entry.name, number, found, inodes)
            elif entry.is_symlink():
                self.links[number] = os.readlink(entry.path)
            else:
                stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                if self._stamps.get(number) != stamp:
                    self._stamps[number] = stamp
                    self._written[number] = Path(entry.path).read_bytes()

    # The states

    def states(self, moment: Moment, chance: random.Random, *, few: bool = False) -> Iterator[Tree]:
        """What the folder may hold after a power cut at `moment`. Some states come twice.

        With `few`: all that was not synced is lost, only its content is, and one state by chance.
        """
        made = [c for c in self.changes if c.made <= moment.number]
        pending = [c for c in made if c.durable is None or c.durable > moment.number]
        everything = tuple(range(len(pending)))
        some = tuple(index for index in everything if chance.random() < 0.5)
        lost_sets = (everything, (), some) if few else _subsets(everything)
        for lost in lost_sets:
            without = {id(pending[index]) for index in lost}
            kept = list(_tree(_names(c for c in made if id(c) not in without), ROOT, ""))
            found = moment.written
            torn = {one for _, one in kept if one in found and moment.synced.get(one) != found[one]}
            tears: tuple[Tear, ...] = (*_TEARS, _any_tear(chance))
            if not torn or lost == everything:
                tears = tears[:1]
            elif few and lost == some:
                tears = tears[-1:]
            for tear in tears:
                yield {
                    path: None
                    if one in self.folders
                    else self.links[one]
                    if one in self.links
                    else tear(moment.synced.get(one, b""), found[one])
                    if one in torn
                    else found[one]
                    for path, one in kept
                }


def _names(changes: Iterable[Change]) -> dict[int, dict[str, int]]:
    """What each folder holds after these changes."""
    names: dict[int, dict[str, int]] = {}
    for change in changes:
        for folder, name, one in change.names:
            listing = names.setdefault(folder, {})
            if one is None:
                listing.pop(name, None)
            else:
                listing[name] = one
    return names


def _tree(names: dict[int, dict[str, int]], folder: int, above: str) -> Iterator[tuple[str, int]]:
    for name, one in sorted(names.get(folder, {}).items()):
        yield above + name, one
        yield from _tree(names, one, f"{above}{name}/")


def _subsets(everything: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Which changes are lost."""
    if len(everything) <= _ALL_SUBSETS:
        for size in range(len(everything) + 1):
            yield from combinations(everything, size)
        return
    for first in range(len(everything) + 1):
        yield everything[first:]
    for one in everything:
        yield (one,)
        yield everything[:one] + everything[one + 1 :]


Tear = Callable[[bytes, bytes], bytes]


def _half(synced: bytes, written: bytes) -> bytes:
    middle = (min(len(synced), len(written)) + len(written) + 1) // 2
    return written[:middle] + synced[middle:]


def _zeros(synced: bytes, written: bytes) -> bytes:
    """The size is there, the content is not."""
    return synced[: len(written)].ljust(len(written), b"\0")


_TEARS: tuple[Tear, ...] = (
    lambda synced, written: synced,
    lambda synced, written: written,
    _half,
    _zeros,
)


def _any_tear(chance: random.Random) -> Tear:
    return lambda synced, written: chance.choice(_TEARS)(synced, written)


def restore(tree: Tree, folder: Path) -> None:
    """Make `folder`, which does not exist, with this content."""
    folder.mkdir(mode=0o700)
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir(mode=0o700)
        elif isinstance(content, str):
            (folder / path).symlink_to(content)
        else:
            (folder / path).write_bytes(content)


# Recording

_recorder: Recorder | None = None
_hooked = False


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's audit hook, which cannot be removed."""
    recorder = _recorder
    if recorder is None:
        return
    if event == "open":
        path, _, flags = arguments
        told = isinstance(flags, int) and flags & _WRITING and recorder.holds(path)
    else:
        told = event in _CHANGES and any(
            recorder.holds(path, arguments[-1]) for path in arguments[:2]
        )
    if told:
        recorder.moment(f"{event} {arguments[0]}")


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Record what this process does in the recorder's folder."""
    global _recorder, _hooked
    from memconsole.runs.record.log import eventlog

    if not _hooked:
        sys.addaudithook(_heard)
        _hooked = True
    real = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

    def synced(sync: Callable[[int], None]) -> Callable[[int], None]:
        def replaced(descriptor: int) -> None:
            recorder.moment(f"sync of {os.readlink(f'/proc/self/fd/{descriptor}')}")
            sync(descriptor)
            recorder.sync(descriptor)

        return replaced

    log_sync = eventlog._sync
    _recorder = recorder
    try:
        for name, function in real.items():
            setattr(os, name, synced(function))
        eventlog._sync = os.fdatasync
        yield
        recorder.moment("the end")
    finally:
        _recorder = None
        eventlog._sync = log_sync
        for name, function in real.items():
            setattr(os, name, function)
