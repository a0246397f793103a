"""The held-out rows. Every evaluation uses the same rows in the same order."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.tasks.language import MASKED
from memconsole_trainer.data.sources.documents import Documents, StreamDocuments
from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.sources.split import Everything, Split
from memconsole_trainer.data.spread import evaluated_rows, even_rows, spread_order
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text.rows.batches import Boundary, make_batch
from memconsole_trainer.data.text.tokens.marked import (
    ids,
    learned,
    marked_rows,
    narrowed,
    trimmed,
)
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, Tokens
from memconsole_trainer.data.text.tokens.tokens import ArrayRows, windows
from memconsole_trainer.engine import Batch

PROMPT_TOKENS = 16
"""Tokens of validation text that a run's samples continue."""
MOST_TOKENS = 1 << 20
MOST_UNKNOWN = 0.01
"""If more of the targets are the unknown token, their loss says little about the text."""
LEAST_ROWS = 64
"""A mixture is validated on at least this many rows if its sources hold out as many."""
STREAM_DOCUMENTS = 256
"""Most documents held out from a stream: the first ones that the split selects."""
STREAM_PROBE = 20_000
"""Documents of a stream that are searched for held-out ones."""


class HeldRows(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Tokens: ...


@dataclass(frozen=True)
class Validation:
    """The held-out documents, cut into rows without overlapping targets."""

    rows: HeldRows
    tokens: int
    token_bytes: HeldRows | None
    """The same rows, with the number of text bytes of each token in place of its id; None if unknown."""
    prompt: list[int]
    """Beginning of the first held-out document."""
    boundary: Boundary | None = None
    """How to tell documents apart, if they are isolated."""
    unknown: int | None = None
    """The token of text that the tokenizer does not know, if it has one."""
    together: int = 1
    """So many rows in succession belong together. A batch holds all of them."""
    warnings: tuple[str, ...] = ()
    """Warnings about the held-out data for the user."""

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, shape: BatchShape, limit: int) -> Iterator[Batch]:
        """Yield batches (1, micro_batch, sequence_length), the last one padded. A `limit` of them, 0
        for none, is spread over all rows."""
        one, each = dataclasses.replace(shape, micro_batches=1), self.together
        for groups in evaluated_rows(len(self) // each, one.rows // each, limit):
            numbers = [each * group + i for group in groups.tolist() for i in range(each)]
            yield make_batch([self.rows[i] for i in numbers], one, self.boundary)

    def unigram_loss(self, counts: NDArray[np.int64], shape: BatchShape, limit: int) -> float:
        """Nats per target of the unigram model of `counts` (vocab_size,), with add-one smoothing,
        on the same batches. It is the loss of a model that only knows how frequent each token
        is."""
        logs = np.log(counts + 1.0) - math.log(float(counts.sum()) + len(counts))
        total, targets = 0.0, 0
        for batch in self.batches(shape, limit):
            seen = batch["targets"][batch["targets"] != MASKED]
            total -= float(logs[seen].sum())
            targets += seen.size
        return total / max(targets, 1)

    @functools.cached_property
    def unknown_share(self) -> float:
        """The share of the unknown token among the targets of all rows."""
        if self.unknown is None:
            return 0.0
        targets = [learned(self.rows[i][1:]) for i in range(len(self))]
        unknown = sum(int(np.count_nonzero(row == self.unknown)) for row in targets)
        return unknown / max(sum(map(len, targets)), 1)

    def target_bytes(self, shape: BatchShape, limit: int) -> int | None:
        """UTF-8 bytes of text covered by the unmasked targets of the same batches; None if they
        are not known, or if more than `MOST_UNKNOWN` of all targets are the unknown token."""
        if self.token_bytes is None or self.unknown_share > MOST_UNKNOWN:
            return None
        sizes = dataclasses.replace(
            self, rows=self.token_bytes, boundary=None
        )  # sizes are not tokens, so none of them is a boundary
        both = zip(self.batches(shape, limit), sizes.batches(shape, limit), strict=True)
        return sum(int(b["targets"][a["targets"] != MASKED].sum()) for a, b in both)


class JoinedRows:
    """Some rows of each of several sources, one source after another."""

    def __init__(self, parts: Sequence[HeldRows], numbers: Sequence[NDArray[np.intp]]) -> None:
        """`numbers` are those of the rows that are taken from each of `parts`."""
        self._parts, self._numbers = parts, numbers
        self._firsts = np.cumsum([0, *map(len, numbers)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Tokens:
        part = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._parts[part][int(self._numbers[part][index - int(self._firsts[part])])]


def joined(parts: Sequence[Validation], shares: Sequence[float]) -> Validation:
    """Held-out rows of several sources by their shares, those of each source at even distances (see
    `rows_by_shares`). All rows of a single source."""
    if len(parts) == 1:
        return parts[0]
    taken = rows_by_shares([len(part) for part in parts], shares)
    numbers = [even_rows(len(part), most) for part, most in zip(parts, taken, strict=True)]
    sizes = [part.token_bytes for part in parts if part.token_bytes is not None]
    return Validation(
        rows=JoinedRows([part.rows for part in parts], numbers),
        tokens=sum(
            part.tokens * most // max(len(part), 1) for part, most in zip(parts, taken, strict=True)
        ),
        token_bytes=JoinedRows(sizes, numbers) if len(sizes) == len(parts) else None,
        prompt=parts[0].prompt,
    )


def rows_by_shares(counts: Sequence[int], shares: Sequence[float]) -> list[int]:
    """How many of its `counts` rows each source gives, so that the rows of all are by `shares`: as many as
    the source that has the fewest for its share allows, and at least one of each source that has rows.

    If that would be fewer than `LEAST_ROWS` in all, the sources that have more rows give more of them, and
    those that have too few give all, which is less than their share.
    """
    both = list(zip(counts, shares, strict=True))
    whole = min((count / share for count, share in both if count), default=0.0)
    while True:
        taken = [min(count, max(1, round(share * whole))) for count, share in both]
        if sum(taken) >= min(LEAST_ROWS, sum(counts)):
            return taken
        whole *= 1.05


def from_texts(
    source: Documents,
    split: Split,
    tokenizer: Tokenizer,
    length: int,
    most: int = MOST_TOKENS,
) -> Validation:
    """Tokenize the held-out documents, about `most` tokens of them, spread over all. The result is
    empty if there are none."""
    found: dict[int, tuple[Tokens, NDArray[np.int32]]] = {}
    tokens = 0
    for number, text in held_out_texts(source, split):
        ids, covered = tokenizer.encode_measured(text)
        found[number] = ids, covered
        tokens += len(ids)
        if tokens >= most:
            break
    parts = [found[number] for number in sorted(found)]
    joined = np.concatenate([np.empty(0, tokenizer.dtype), *(ids for ids, _ in parts)])
    covered = np.concatenate([np.empty(0, np.int32), *(covered for _, covered in parts)])
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
    most: int = MOST_TOKENS,
) -> Validation:
    """The held-out rows of a file of token rows, about `most` tokens of them, from blocks spread over the
    file, in windows of `row_tokens`. `tokenizer` is the one that made the tokens, if known."""
    parts: dict[int, NDArray[np.int32]] = {}
    total, tokens, count, size = 0, 0, source.count or 0, source.block_size
    for start in (block * size for block in spread_order(-(-count // size)).tolist()):
        stop = min(start + size, count)
        held = split.held_out(start, stop)
        if held.any():
            rows = marked_rows(source.rows(start, stop)[held], tokenizer)
            parts[start] = windows(rows, row_tokens, row_tokens - 1).reshape(-1)
            total += rows.size
            tokens += len(learned(rows))
        if total >= most:
            break
    whole = np.concatenate([np.empty(0, np.int32), *(parts[start] for start in sorted(parts))])
    joined = narrowed(whole, vocab_size - 1)
    table = tokenizer.id_bytes if tokenizer is not None else None
    covered = None
    if table is not None and tokenizer is not None and joined.max(initial=0) < len(table):
        table = table.copy()
        table[tokenizer.special_ids] = 0
        covered = ArrayRows(table[np.maximum(joined, 0)], row_tokens, row_tokens)
    return Validation(
        rows=ArrayRows(joined, row_tokens, row_tokens),
        tokens=tokens,
        token_bytes=covered,
        prompt=ids(trimmed(joined[:row_tokens]))[: min(PROMPT_TOKENS, row_tokens - 1)].tolist(),
    )


def held_out_numbers(count: int, split: Split) -> NDArray[np.int64]:
    """The numbers of the held-out ones of `count` documents. The first ones, however many, are spread over all."""
    numbers = split.numbers(count, held=True)
    return numbers[spread_order(len(numbers))]


def held_out_texts(source: Documents, split: Split) -> Iterator[tuple[int, str]]:
    """The numbers and texts of the held-out documents, of which the first ones, however many, are
    spread over all; of a stream, in order."""
    if split.fraction == 0.0:
        return
    if isinstance(source, StreamDocuments):
        if isinstance(split, Everything):
            yield from enumerate(source.iterate())
            return
        found = 0
        for index, text in enumerate(source.iterate()):
            if split.held_out(index, index + 1)[0]:
                yield index, text
                found += 1
            if found == STREAM_DOCUMENTS or index + 1 == STREAM_PROBE:
                return
        return
    for number in held_out_numbers(source.count or 0, split).tolist():
        yield number, source.read(number, number + 1)[0]
