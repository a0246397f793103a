"""NVML's answers about cards and the processes on them, without a driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest


class Cards:
    """Cards by their UUIDs, each with the processes on it: their numbers and bytes."""

    def __init__(self, listed: dict[str, list[tuple[int, int | None]]]) -> None:
        self.listed = listed
        self.refused = ""
        """The card that is not for this user."""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Answer the calls of `pynvml`."""
        patch.setattr(pynvml, "nvmlInit", lambda: None)
        patch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(self.listed))
        patch.setattr(
            pynvml, "nvmlDeviceGetHandleByIndex", lambda n: self._card(list(self.listed)[n])
        )
        patch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", self._card)
        patch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", self._processes)

    def _card(self, uuid: str) -> str:
        if uuid not in self.listed or uuid == self.refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def _processes(self, card: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.listed[card]]
