"""The protocol by which the processes of a run communicate and decide together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


class Gang(Protocol):
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

    def most(self, *numbers: int) -> tuple[int, ...]:
        """The largest of each number over all processes."""
        ...

    def tell(self, text: str = "") -> str:
        """Send the leader's `text` to all processes and return it."""
        ...


class Alone:
    """Implements `Gang` for a run of one process."""

    rank, size = 0, 1
    exchange_seconds = None

    def most(self, *numbers: int) -> tuple[int, ...]:
        return numbers

    def tell(self, text: str = "") -> str:
        return text


class ElsewhereError(Exception):
    """Another process of the run has failed. That process reports why."""


def share_of(gang: Gang, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The rows (micro_batch, ...) of each array that this process computes."""
    found = {}
    for name, rows in arrays.items():
        first, last = (len(rows) * r // gang.size for r in (gang.rank, gang.rank + 1))
        found[name] = rows[first:last]
    return found
