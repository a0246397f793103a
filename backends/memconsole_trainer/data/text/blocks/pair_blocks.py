"""Records with preferences as blocks of rows: one row for each answer, the chosen one before the rejected one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memconsole_trainer.data.sources.documents import DataError, Documents
from memconsole_trainer.data.sources.split import Split
from memconsole_trainer.data.text.blocks.packing import Cuts
from memconsole_trainer.data.text.blocks.text_blocks import TextBlocks
from memconsole_trainer.data.text.rows.validation import MOST_TOKENS, Validation, held_out_texts
from memconsole_trainer.data.text.tokens.marked import encode, marked_dtype, only_read
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, Tokens
from memconsole_trainer.data.text.tokens.tokens import ArrayRows


class PairBlocks(TextBlocks):
    """Blocks of pairs. A pair has `row_tokens`: both answers, each with its prompt, cut or padded to the length of a row."""

    def __init__(
        self, documents: Documents, split: Split, tokenizer: Tokenizer, sequence_length: int
    ) -> None:
        pair_tokens = 2 * (sequence_length + 1)
        super().__init__(documents, split, tokenizer, pair_tokens - 1, pair_tokens)

    def _encoded(self, texts: Sequence[Any]) -> list[Tokens]:
        return pairs_of(self._tokenizer, texts)

    def _joined(self, documents: Sequence[Tokens]) -> tuple[Tokens, Cuts]:
        return laid(documents, self._tokenizer, self.row_tokens // 2)


def pairs_of(tokenizer: Tokenizer, texts: Sequence[Any]) -> list[Tokens]:
    """The marked tokens (2, n) of each `Pair`: those of the chosen answer, and of the rejected one. The shorter of them is
    padded."""
    answers = [answer for text in texts for answer in (text.chosen, text.rejected)]
    found = [one.tokens for one in encode(tokenizer, answers, True, offsets=False)]
    return [
        np.stack([fitted(one, max(map(len, both))) for one in both])
        for both in zip(found[::2], found[1::2], strict=True)
    ]


def fitted(tokens: Tokens, length: int) -> Tokens:
    """Marked tokens (n,), cut or padded to `length`."""
    found: Tokens = np.full(length, np.iinfo(tokens.dtype).min, tokens.dtype)
    found[: len(tokens)] = tokens[:length]
    return found


def laid(pairs: Sequence[Tokens], tokenizer: Tokenizer, row_tokens: int) -> tuple[Tokens, Cuts]:
    """Pairs one after another, each answer in `row_tokens`; and how many of them were cut. Nothing is learned of answers
    that are equal, as cut ones may be."""
    rows = []
    for pair in pairs:
        chosen, rejected = (fitted(answer, row_tokens) for answer in pair)
        alike = np.array_equal(chosen, rejected)
        rows += [only_read(row) if alike else row for row in (chosen, rejected)]
    cut = [pair[:, row_tokens:] for pair in pairs if pair.shape[1] > row_tokens]
    joined = np.concatenate([np.empty(0, marked_dtype(tokenizer.largest_id)), *rows])
    return joined, Cuts(
        documents=len(pairs),
        cut=len(cut),
        answers_cut=sum(bool((rest >= 0).any()) for rest in cut),
        longest=max((pair.shape[1] for pair in pairs), default=0),
    )


def held_out_pairs(
    source: Documents, split: Split, tokenizer: Tokenizer, length: int, most: int = MOST_TOKENS
) -> Validation:
    """The held-out pairs, about `most` tokens of them, spread over all. Two rows in succession are a pair. Raises
    `DataError` if no row holds an answer."""
    found: dict[int, Tokens] = {}
    total = 0
    for number, text in held_out_texts(source, split):
        (found[number],) = pairs_of(tokenizer, [text])
        total += 2 * (length + 1)
        if total >= most:
            break
    pairs = [found[number] for number in sorted(found)]
    tokens, cuts = laid(pairs, tokenizer, length + 1)
    if found and not (tokens >= 0).any():
        raise DataError(
            f"the answers of every held-out pair are equal, or not within data.sequence_length = {length:,} tokens, and no "
            "other token counts; expected other pairs, longer rows, or shorter prompts"
        )
    return Validation(
        rows=ArrayRows(tokens, length + 1, length + 1),
        tokens=total,
        token_bytes=None,
        prompt=[],
        together=2,
        warnings=cuts.warnings(length, "held-out pairs"),
    )
