"""Memory of a trainer on a CPU: its anonymous resident memory above a baseline, and the peak of
that.

Anonymous pages are the heap, which holds the tensors. File pages (libraries mapped lazily during
the first step, memory-mapped weights and datasets) are left out, because nothing was allocated for
them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from dataclasses import dataclass
from typing import ClassVar

from memconsole_trainer.host import heap

_CLEAR_REFS = "/proc/self/clear_refs"


@dataclass(frozen=True)
class Resident:
    """Resident bytes of this process by kind. `high` is the kernel's high-water mark of their
    sum."""

    anonymous: int
    mapped: int
    high: int
    shared: int = 0
    """Part of `mapped` that is shared memory: tmpfs, /dev/shm, shared anonymous mappings."""


@dataclass(frozen=True)
class Tree:
    """Resident bytes of this process and all its descendants, including the frameworks' own."""

    resident: int
    anonymous: int
    shared: int
    """Shared memory of the process that maps the most. Pages mapped by several processes exist
    once."""


class HostMemory:
    """Growth of this process's anonymous memory since `start()`, now and at its peak.

    The kernel's high-water mark also covers file pages, and only its total is exact. A thread reads
    the mark and the split into kinds 20 times a second. If the mark has risen, the peak lies after
    the previous reading; the larger file-page count of the two readings is subtracted from it. This
    finds a peak between two readings, and does not count newly mapped libraries as tensors. Only
    the instance started last is watched: a process trains one model.
    """

    highest_anonymous = 0
    """Most anonymous bytes seen in this process, including the baseline."""
    highest_resident = 0
    """Most resident bytes of this process before the last `reset_peak()`, such as those of a compiler."""
    _watched: ClassVar[weakref.ref[HostMemory] | None] = None

    def __init__(self, period_seconds: float = 0.05) -> None:
        self._period = period_seconds
        self._lock = threading.Lock()
        self._baseline = 0
        self._peak = 0
        self._mark = 0
        self._mapped = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Return free heap memory, take the baseline, and start watching."""
        before = HostMemory._watched() if HostMemory._watched is not None else None
        if before is not None:
            before.close()
        HostMemory._watched = weakref.ref(self)
        gc.collect()
        heap.close_gaps()
        with self._lock:
            self._baseline = resident().anonymous
        self.reset_peak()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watch,
                args=(weakref.ref(self), self._stop, self._period),
                name="host-memory",
                daemon=True,
            )
            self._thread.start()

    def growth_bytes(self) -> int:
        """Anonymous bytes now above the baseline, never negative."""
        return max(0, self._sample().anonymous - self._baseline)

    def peak_bytes(self) -> int:
        """Highest growth since `start()` or `reset_peak()`."""
        self._sample()
        return max(0, self._peak - self._baseline)

    def reset_peak(self) -> None:
        """Return free heap memory and restart the measurement of the peak."""
        heap.trim()
        with self._lock:
            HostMemory.highest_resident = max(HostMemory.highest_resident, resident().high)
            with contextlib.suppress(OSError), open(_CLEAR_REFS, "w") as file:
                file.write("5")
            now = resident()
            self._peak, self._mark, self._mapped = now.anonymous, now.high, now.mapped

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._stop.clear()

    def _sample(self) -> Resident:
        with self._lock:
            now = resident()
            peak = now.anonymous
            if now.high > self._mark:
                peak = max(peak, now.high - max(now.mapped, self._mapped))
                self._mark = now.high
            self._mapped = now.mapped
            self._peak = max(self._peak, peak)
            HostMemory.highest_anonymous = max(HostMemory.highest_anonymous, peak)
            return now


def _watch(memory: weakref.ref[HostMemory], stop: threading.Event, period: float) -> None:
    """Sample every `period` seconds until stopped, or until the `HostMemory` is
    garbage-collected."""
    while not stop.wait(period):
        watched = memory()
        if watched is None:
            return
        watched._sample()
        del watched


def resident(pid: int | None = None) -> Resident:
    """Current resident memory of this process or of `pid`. Swapped pages count as anonymous."""
    try:
        with open(f"/proc/{pid or 'self'}/status", "rb", buffering=0) as file:
            text = file.read(8192)
        anonymous = _kib(text, b"RssAnon:") + _kib(text, b"VmSwap:")
        shared = _kib(text, b"RssShmem:")
        mapped = _kib(text, b"RssFile:") + shared
        return Resident(anonymous, mapped, _kib(text, b"VmHWM:"), shared)
    except (OSError, ValueError):
        import psutil

        rss = psutil.Process(pid).memory_info().rss
        return Resident(rss, 0, rss)


def highest_resident() -> int:
    """Most resident bytes of this process so far, those before a `reset_peak()` included."""
    return max(resident().high, HostMemory.highest_resident)


def tree_memory() -> Tree:
    """Current memory of this process and its descendants."""
    import psutil

    found = []
    me = psutil.Process(os.getpid())
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            found.append((process.memory_info().rss, resident(process.pid)))
    return Tree(
        resident=sum(rss for rss, _ in found),
        anonymous=sum(kinds.anonymous for _, kinds in found),
        shared=max((kinds.shared for _, kinds in found), default=0),
    )


def _kib(text: bytes, key: bytes) -> int:
    """The value of a line ``Key:   123 kB`` in bytes. Raises ValueError if there is no such
    line."""
    start = text.index(b"\n" + key) + 1 + len(key)
    return int(text[start : text.index(b"kB", start)]) * 1024
