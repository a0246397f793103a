"""Measures the time that a process spends in exchanges with the others, the wait for them included."""

from __future__ import annotations

import time
from collections import deque
from typing import TypeAlias

import torch

Mark: TypeAlias = "float | torch.cuda.Event"
"""A moment: seconds of the host's clock, or an event on the stream that was current."""


class Exchanges:
    """The time in exchanges. On a CPU a process blocks during an exchange, so the host's clock measures it.
    On a GPU the host goes on; the time is measured on the stream that waits for the exchange, as far as
    it is known yet."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def mark(self) -> Mark:
        """Now."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def count(self, began: Mark) -> None:
        """Add the time since an exchange `began`."""
        now = self.mark()
        if isinstance(began, float):
            assert isinstance(now, float)
            self._seconds += now - began
        else:
            assert not isinstance(now, float)
            self._pending.append((began, now))

    @property
    def seconds(self) -> float:
        """The total time."""
        while self._pending and self._pending[0][1].query():
            began, ended = self._pending.popleft()
            self._seconds += began.elapsed_time(ended) / 1000
        return self._seconds
