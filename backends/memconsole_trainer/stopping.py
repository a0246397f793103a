"""Passes a request to stop on to the processes that this one has started."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import psutil

POLL_SECONDS = 0.5


def pass_on(stopping: Path, *, watch: bool) -> None:
    """Pass SIGTERM and SIGINT on to all children from now on, and then create the file `stopping` for children that
    are still starting.

    With `watch`, children are also stopped once the file exists, because a signal does not reach other nodes.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.touch(mode=0o600)
        _stop_children()

    if watch:
        threading.Thread(target=_obey, args=(stopping,), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _obey(stopping: Path) -> None:
    while not stopping.exists():
        time.sleep(POLL_SECONDS)
    _stop_children()


def _stop_children() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.terminate()
