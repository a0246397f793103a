"""The held-out rows: the same ones, in the same order, at every evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.tasks.language import MASKED
from memconsole_trainer.data.batches import make_batch
from memconsole_trainer.data.documents import Documents, StreamDocuments
from memconsole_trainer.data.hdf5 import TokenRows
from memconsole_trainer.data.split import Split
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.tokenizer import Tokenizer, Tokens, token_dtype
from memconsole_trainer.data.tokens import ArrayRows, windows
from memconsole_trainer.engine import Batch

PROMPT_TOKENS = 16
"""Of validation text that a run's samples continue."""
MOST_TOKENS = 1 << 20
STREAM_DOCUMENTS = 256
"""Most documents held out of a stream; they are the first ones of it that the split takes."""
STREAM_PROBE = 20_000
"""Documents of a stream looked at for them."""


@dataclass(frozen=True)
class Validation:
    """Tokens of the held-out documents, and the rows cut from them without overlapping targets."""

    rows: ArrayRows
    tokens: int
    token_bytes: ArrayRows | None
    """The same rows with each token's bytes of text in its place; None where those are not known."""
    prompt: list[int]
    """How the first held-out document begins."""
    boundary: int | None = None
    """The token that ends a document, where the documents of a row are isolated."""

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, shape: BatchShape, limit: int) -> Iterator[Batch]:
        """Batches (1, micro_batch, sequence_length), the last one padded; `limit` of them unless 0."""
        one = dataclasses.replace(shape, micro_batches=1)
        for number, start in enumerate(range(0, len(self), one.rows)):
            if limit and number >= limit:
                return
            stop = min(start + one.rows, len(self))
            yield make_batch([self.rows[i] for i in range(start, stop)], one, self.boundary)

    def unigram_loss(self, counts: NDArray[np.int64], shape: BatchShape, limit: int) -> float:
        """Nats per target, on the same batches, of the add-one-smoothed unigram model of `counts`
        (vocab_size,): what is reached by knowing only how frequent each token is."""
        logs = np.log(counts + 1.0) - math.log(float(counts.sum()) + len(counts))
        total, targets = 0.0, 0
        for batch in self.batches(shape, limit):
            seen = batch["targets"][batch["targets"] != MASKED]
            total -= float(logs[seen].sum())
            targets += seen.size
        return total / max(targets, 1)

    def target_bytes(self, shape: BatchShape, limit: int) -> int | None:
        """UTF-8 bytes of the text that the targets of the same batches cover, masked ones left out."""
        if self.token_bytes is None:
            return None
        sizes = dataclasses.replace(
            self, rows=self.token_bytes, boundary=None
        )  # sizes are no tokens
        both = zip(self.batches(shape, limit), sizes.batches(shape, limit), strict=True)
        return sum(int(b["targets"][a["targets"] != MASKED].sum()) for a, b in both)


def from_texts(source: Documents, split: Split, tokenizer: Tokenizer, length: int) -> Validation:
    """The held-out documents, tokenized; empty when there are none."""
    parts: list[Tokens] = []
    sizes: list[NDArray[np.int32]] = []
    tokens = 0
    for text in _held_out(source, split):
        ids, covered = tokenizer.encode_measured(text)
        parts.append(ids)
        sizes.append(covered)
        tokens += len(ids)
        if tokens >= MOST_TOKENS:
            break
    joined = np.concatenate(parts) if parts else np.empty(0, dtype=tokenizer.dtype)
    covered = np.concatenate(sizes) if sizes else np.empty(0, dtype=np.int32)
    return Validation(
        rows=ArrayRows(joined, length + 1, length),
        tokens=tokens,
        token_bytes=ArrayRows(covered, length + 1, length),
        prompt=joined[:PROMPT_TOKENS].tolist(),
    )


def from_rows(
    source: TokenRows,
    split: Split,
    vocab_size: int,
    row_tokens: int,
    tokenizer: Tokenizer | None = None,
) -> Validation:
    """The held-out rows of a file of token rows, in windows of `row_tokens`, made by `tokenizer`."""
    parts, total, count = [], 0, source.count or 0
    for start in range(0, count, source.block_size):
        stop = min(start + source.block_size, count)
        held = split.held_out(start, stop)
        if held.any():
            rows = source.rows(start, stop)[held].astype(token_dtype(vocab_size))
            parts.append(windows(rows, row_tokens, row_tokens - 1).reshape(-1))
            total += rows.size
        if total >= MOST_TOKENS:
            break
    joined = np.concatenate(parts) if parts else np.empty(0, dtype=token_dtype(vocab_size))
    table = tokenizer.id_bytes if tokenizer is not None else None
    covered = None
    if table is not None and tokenizer is not None and joined.max(initial=0) < len(table):
        table = table.copy()
        table[tokenizer.special_ids] = 0
        covered = ArrayRows(table[joined], row_tokens, row_tokens)
    return Validation(
        rows=ArrayRows(joined, row_tokens, row_tokens),
        tokens=total,
        token_bytes=covered,
        prompt=joined[: min(PROMPT_TOKENS, row_tokens - 1)].tolist(),
    )


def _held_out(source: Documents, split: Split) -> Iterator[str]:
    if split.fraction == 0.0:
        return
    if isinstance(source, StreamDocuments):
        found = 0
        for index, text in enumerate(source.iterate()):
            if split.held_out(index, index + 1)[0]:
                yield text
                found += 1
            if found == STREAM_DOCUMENTS or index + 1 == STREAM_PROBE:
                return
        return
    count = source.count or 0
    for start in range(0, count, 1 << 16):
        for offset in np.flatnonzero(split.held_out(start, min(start + (1 << 16), count))):
            yield source.read(start + int(offset), start + int(offset) + 1)[0]
