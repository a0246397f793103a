"""The training rows of preferences: both answers of each pair in succession, with their likelihoods under the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
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

    def __init__(self) -> None:
        self._scored: NDArray[np.void] | None = None

    def take(self, scored: NDArray[np.void]) -> None:
        """Use these likelihoods, of the type `SCORED`."""
        self._scored = np.unique(scored)

    def attached(self, batch: Batch) -> Batch:
        """A batch of language with the likelihood of each row, 0 until they are known and for padding. Its weight is the
        number of pairs. Raises `DataError` for a row without a likelihood."""
        targets = batch["targets"]
        counts = (targets != MASKED).any(-1)
        found = np.zeros(counts.shape, np.float32)
        if self._scored is not None:
            found[counts] = self._of(keys_of(batch)[counts])
        pairs = counts.reshape(-1, 2).any(-1)
        return Batch({**batch.arrays, "reference": found}, float(np.count_nonzero(pairs)))

    def _of(self, keys: NDArray[np.uint64]) -> NDArray[np.float32]:
        assert self._scored is not None
        known = self._scored["row"]
        places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        if not len(known) or (known[places] != keys).any():
            raise DataError(
                "the reference model has not scored some of these pairs: the data have changed since the run began; start "
                "a new run"
            )
        found: NDArray[np.float32] = self._scored["likelihood"][places]
        return found


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

    def __init__(self, pairs: TextRows, reference: Reference) -> None:
        self._pairs, self._reference = pairs, reference
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
        return self._reference.attached(made), units


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
