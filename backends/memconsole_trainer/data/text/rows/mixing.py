"""A custom Grain dataset that mixes the rows of several sources by weight.

Importing this imports Grain, so call `rows.load_grain` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.split import hashed
from memconsole_trainer.data.text.tokens.tokenizer import Tokens
from memconsole_trainer.randomness import generator

CHOICES = 1024
"""Rows whose sources are drawn at a time."""

Pass = Callable[[int], Any]
"""The rows of a source in its pass of this number, as a Grain dataset."""


class MixedIterator(grain.DatasetIterator):
    """Yields rows of the first source and of others, each drawn with the chance `shares` gives it.

    It ends when the first source is drawn and has no more rows. Other sources that end begin again, in
    another order. The state is the number of rows so far, the state of the first source, and for each
    other source the number of its pass and its state.
    """

    def __init__(
        self, first: Any, others: Sequence[Pass], shares: Sequence[float], seed: int, purpose: str
    ) -> None:
        super().__init__()
        self._first = first
        self._others = others
        self._bounds = np.cumsum(shares)[:-1]
        self._base = np.uint64(generator(seed, purpose).integers(2**63))
        self._row = 0
        self._drawn: tuple[int, Any] = (-1, None)
        self._passes = [0] * len(others)
        self._iterators = [other(0).__iter__() for other in others]

    def _source(self) -> int:
        """Which source the next row comes from: a function of seed, purpose and row number."""
        chunk, place = divmod(self._row, CHOICES)
        if self._drawn[0] != chunk:
            numbers = np.arange(chunk * CHOICES, (chunk + 1) * CHOICES, dtype=np.uint64)
            with np.errstate(over="ignore"):
                values = hashed(numbers + self._base) / 2.0**64
            self._drawn = (chunk, np.searchsorted(self._bounds, values, side="right").tolist())
        return int(self._drawn[1][place])

    def __next__(self) -> Tokens:
        source = self._source()
        row: Tokens = next(self._first) if source == 0 else self._of_other(source - 1)
        self._row += 1
        return row

    def _of_other(self, index: int) -> Tokens:
        for _ in range(2):
            try:
                row: Tokens = next(self._iterators[index])
                return row
            except StopIteration:
                self._passes[index] += 1
                self._iterators[index] = self._others[index](self._passes[index]).__iter__()
        raise DataError(f"source {index + 1} of data.mix holds nothing to train on")

    def get_state(self) -> dict[str, Any]:
        others = [[p, i.get_state()] for p, i in zip(self._passes, self._iterators, strict=True)]
        return {"row": self._row, "first": self._first.get_state(), "others": others}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Its `first` may be None: then the first source begins, and the others continue
        where an earlier epoch left them."""
        self._row = state["row"]
        if state["first"] is not None:
            self._first.set_state(state["first"])
        for index, (number, inner) in enumerate(state["others"]):
            self._passes[index] = number
            self._iterators[index] = self._others[index](number).__iter__()
            self._iterators[index].set_state(inner)


class Mixed(grain.IterDataset):
    """Rows of several sources; the first one is that of this epoch."""

    def __init__(
        self, first: Any, others: Sequence[Pass], shares: Sequence[float], seed: int, purpose: str
    ) -> None:
        super().__init__()
        self._first = first
        self._arguments = (others, shares, seed, purpose)

    def __iter__(self) -> MixedIterator:
        return MixedIterator(self._first.__iter__(), *self._arguments)
