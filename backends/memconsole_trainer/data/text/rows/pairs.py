"""The training rows of preferences: both answers of each pair in succession, and their likelihoods under a reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.tasks.language import MASKED
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchShape, RowIterator
from memconsole_trainer.data.text.rows.batches import TextRows
from memconsole_trainer.engine import Array, Batch

SCORED = np.dtype([("row", "<u8"), ("likelihood", "<f4")])
"""A hash of the tokens of a row, and the log-likelihood of its answer under the reference."""
_KEY_BYTES = 8


class Reference:
    """The log-likelihood of every answer under the weights that training starts from. It takes 12 bytes for each."""

    def __init__(self, scored: NDArray[np.void] | None = None) -> None:
        """`scored` has the type `SCORED`. Without it, the likelihoods are 0 until they are given."""
        self._scored = None if scored is None else each_once(scored)

    def take(self, scored: NDArray[np.void]) -> None:
        """Use these likelihoods, of the type `SCORED`."""
        self._scored = each_once(scored)

    def lacks(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which rows with these keys have no likelihood."""
        known = np.empty(0, SCORED)["row"] if self._scored is None else self._scored["row"]
        if not len(known):
            return np.ones(keys.shape, np.bool_)
        places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        missing: NDArray[np.bool_] = known[places] != keys
        return missing

    def attached(self, batch: Batch) -> Batch:
        """A batch of pairs with the likelihood of each row, 0 until they are known and for padding. Raises `DataError` for a
        row without a likelihood."""
        counts = (batch["targets"] != MASKED).any(-1)
        found = np.zeros(counts.shape, np.float32)
        if self._scored is not None:
            keys = keys_of(batch)[counts]
            if self.lacks(keys).any():
                raise DataError(
                    "the starting weights have not scored some of these pairs, because the data have changed since the "
                    "run scored them; memconsole resume RUN --changed-data scores the new ones"
                )
            found[counts] = self._scored["likelihood"][np.searchsorted(self._scored["row"], keys)]
        return Batch({**batch.arrays, "reference": found}, batch.weight)


def weighted(batch: Batch) -> Batch:
    """A batch of language whose rows are pairs, with the number of pairs that have a target as its weight."""
    counts = (batch["targets"] != MASKED).any(-1)
    return Batch(batch.arrays, float(np.count_nonzero(of_pairs(counts))))


def each_once(scored: NDArray[np.void]) -> NDArray[np.void]:
    """Every row once, in the order of the hashes, with the likelihood that comes first. Another batch may round the
    likelihood of a row otherwise."""
    _, first = np.unique(scored["row"], return_index=True)
    found: NDArray[np.void] = scored[first]
    return found


def of_pairs(rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether it is true of either row of each pair (n,). `rows` has 2 n elements in any shape."""
    pairs = rows.reshape(-1, 2)
    return pairs[:, 0] | pairs[:, 1]


def keys_of(batch: Batch) -> NDArray[np.uint64]:
    """A hash of each row's tokens and masks (micro_batches, micro_batch)."""
    inputs, targets = batch["inputs"], batch["targets"]
    length = inputs.shape[-1]
    both = zip(inputs.reshape(-1, length), targets.reshape(-1, length), strict=True)
    digests = (
        hashlib.blake2b(x.tobytes() + y.tobytes(), digest_size=_KEY_BYTES).digest() for x, y in both
    )
    return np.frombuffer(b"".join(digests), "<u8").reshape(inputs.shape[:-1])


class PairRows:
    """The rows of `TextRows` whose rows are pairs, one after the other."""

    at_hand = False

    def __init__(self, pairs: TextRows, finish: Callable[[Batch], Batch]) -> None:
        """`finish` makes a batch of language one of pairs."""
        self._pairs, self._finish = pairs, finish
        self.row_bytes = pairs.row_bytes // 2
        self.shuffle_buffer = 2 * pairs.shuffle_buffer

    def epoch(self, epoch: int) -> RowIterator:
        return _Answers(self._pairs.epoch(epoch))

    def after(self, iterator: RowIterator) -> Any:
        """None: each epoch begins at its first row."""
        return None

    def join(self, rows: list[Any]) -> Any:
        return self._pairs.join(rows)

    def batch(self, joined: Any, shape: BatchShape) -> tuple[Batch, int]:
        made, units = self._pairs.batch(joined, shape)
        return self._finish(made), units


class _Answers:
    """Yields the answers of each pair. Batches have an even number of rows, so that its state is asked for between pairs
    alone."""

    def __init__(self, pairs: RowIterator) -> None:
        self._pairs = pairs
        self._second: Array | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._second is None:
            first, self._second = np.split(next(self._pairs), 2)
            return first
        second, self._second = self._second, None
        return second

    def get_state(self) -> Any:
        assert self._second is None
        return self._pairs.get_state()

    def set_state(self, state: Any) -> None:
        self._second = None
        self._pairs.set_state(state)
