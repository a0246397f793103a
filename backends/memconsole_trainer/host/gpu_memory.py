"""What NVIDIA's driver charges this process on its cards, by NVML."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pynvml


class GpuMemory:
    """The driver's account of this process: its tensors, what its allocator keeps, and the driver's context.

    The driver may not name this process: a container can have process numbers of its own, and some systems have no
    such account. A card's only process is then taken for this one.
    """

    def __init__(self, uuid: str = "") -> None:
        """`uuid` names the only card to look at, without NVML's prefix. Otherwise all cards are looked at."""
        self._uuid = uuid
        self._cards: list[Any] | None = None
        """NVML's handles; None until NVML has been opened."""
        self._shared = False
        """Whether the driver has ever listed another process."""

    def begin(self) -> None:
        """Open NVML beside the caller: its first call can take seconds on a busy machine."""
        threading.Thread(target=self.open, name="nvml", daemon=True).start()

    def open(self) -> None:
        """Open NVML and find the cards. Without a driver there are none."""
        try:
            pynvml.nvmlInit()
            self._cards = self._found()
        except pynvml.NVMLError:
            self._cards = []

    @property
    def alone(self) -> bool:
        """Whether NVML was asked and has never listed another process, so that the use of the card may be taken for
        that of this process."""
        return self._cards is not None and not self._shared

    def charged(self) -> list[int]:
        """Bytes on each card that this process uses, the largest first; empty if the driver does not tell."""
        cards = self._cards or []
        listed = [process for card in cards for process in _processes(card)]
        own = [process for process in listed if process.pid == os.getpid()]
        if not own and len(cards) == len(listed) == 1:
            own = listed
        self._shared |= len(listed) > len(own)
        return sorted(
            (process.usedGpuMemory for process in own if process.usedGpuMemory), reverse=True
        )

    def _found(self) -> list[Any]:
        for prefix in ("GPU-", "MIG-") if self._uuid else ():
            try:
                return [pynvml.nvmlDeviceGetHandleByUUID(prefix + self._uuid)]
            except pynvml.NVMLError:
                continue
        cards = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # such as a card of others
                cards.append(pynvml.nvmlDeviceGetHandleByIndex(index))
        return cards


def _processes(card: Any) -> list[Any]:
    """The processes that compute on a card; none if the driver cannot tell."""
    try:
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses(card))
    except pynvml.NVMLError:
        return []
