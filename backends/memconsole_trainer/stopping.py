"""Passes a request to stop on to the processes that this one has started."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import psutil

from memconsole.runs.act.trainer.attempt import STOP_SIGNALS

POLL_SECONDS = 0.5


def pass_on(stopping: Path, *, watch: bool) -> None:
    """Pass the signals of `STOP_SIGNALS` on to all children from now on, as SIGTERM, and then create the file `stopping` for children that
    are still starting.

    With `watch`, children are also stopped once the file exists, because a signal does not reach other nodes.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.touch(mode=0o600)
        _stop_children()

    if watch:
        threading.Thread(target=_obey, args=(stopping,), daemon=True).start()
    for number in STOP_SIGNALS:
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
