"""The process group of a run: how its processes communicate and decide together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


class ProcessGroup(Protocol):
    """The processes of one attempt, each with a rank. Rank 0 leads: it alone writes the run's files.

    All processes call the methods in the same order; each call waits for the others.
    """

    rank: int
    size: int

    @property
    def exchange_seconds(self) -> float | None:
        """Total seconds in exchanges between the processes, the wait for slower ones included; None if they
        cannot be separated from the time of computation."""
        ...

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        """The maximum of each number over all processes."""
        ...

    def broadcast(self, text: str = "") -> str:
        """Send the `text` of rank 0 to all processes and return it."""
        ...


class SingleProcess:
    """Implements `ProcessGroup` for a run of one process."""

    rank, size = 0, 1
    exchange_seconds = None

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        return numbers

    def broadcast(self, text: str = "") -> str:
        return text


class OtherProcessError(Exception):
    """Another process of the run has failed. That process reports why."""


def local_rows(group: ProcessGroup, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The rows (micro_batch / size, ...) of each array (micro_batch, ...) that this process computes."""
    local = {}
    for name, rows in arrays.items():
        first, last = (len(rows) * rank // group.size for rank in (group.rank, group.rank + 1))
        local[name] = rows[first:last]
    return local
