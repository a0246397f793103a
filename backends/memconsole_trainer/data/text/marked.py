"""Tokens that say whether they are learned: a token that is only read is stored as its complement.

`~id` is negative, so the sign is the mask, and blocks, rows and queues of tokens need no second
array. `PAD` fills the end of a row that holds no further document.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.templates.rendered import Rendered
from memconsole_trainer.data.text.tokenizer import Tokenizer, Tokens, as_array


def marked_dtype(largest_id: int) -> type[np.int16] | type[np.int32]:
    """int16 if it holds every id with a mark, else int32."""
    return np.int16 if largest_id < np.iinfo(np.int16).max else np.int32


def pad(tokens: Tokens) -> int:
    """The value of `tokens`' type that stands for no token."""
    return int(np.iinfo(tokens.dtype).min)


def trimmed(row: Tokens) -> Tokens:
    """The row without the padding at its end."""
    if not _signed(row) or len(row) == 0 or row[-1] != pad(row):
        return row
    return row[: len(row) - int(np.argmax(row[::-1] != pad(row)))]


def ids(tokens: Tokens) -> Tokens:
    """The token ids without their marks."""
    return np.where(tokens < 0, ~tokens, tokens) if _signed(tokens) else tokens


def learned(tokens: Tokens) -> Tokens:
    """The ids of the tokens that are learned."""
    return tokens[tokens >= 0] if _signed(tokens) else tokens


class Encoded(NamedTuple):
    """A text's marked tokens, and the characters of each of them (n, 2), without those of an
    end-of-text token that was added."""

    tokens: Tokens
    offsets: NDArray[np.int64]


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], answers_only: bool, offsets: bool = True
) -> list[Encoded]:
    """Each text's tokens, marked, with the tokens that begin and end a text unless the template has
    written them. With `answers_only` just the tokens of its answers are learned, and the end of a
    text that ends with one. Offsets that nobody asks for are zeros: they cost as much as a tenth of
    the tokens."""
    found = []
    dtype = marked_dtype(tokenizer.largest_id)
    begin, end = list(tokenizer.begin), tokenizer.end_of_text
    encoded = _encoded(tokenizer, texts, offsets or answers_only)
    for text, (tokens, places) in zip(texts, encoded, strict=True):
        if tokens[: len(begin)] != begin:
            tokens = [*begin, *tokens]
            places = np.concatenate([np.zeros((len(begin), 2), np.int64), places])
        # Templates of chats often write a line break after the end of the last message.
        ended = end is None or end in tokens[-2 if text[-1:].isspace() else -1 :]
        whole: Tokens = as_array(tokens if ended or end is None else [*tokens, end], dtype)
        if answers_only and isinstance(text, Rendered):
            mask = _in_answers(places, text.answers)
            if not ended:
                mask = np.append(mask, text.ends_with_answer)
            whole = np.where(mask, whole, ~whole)
        found.append(Encoded(whole, places))
    return found


def _encoded(
    tokenizer: Tokenizer, texts: Sequence[str], wanted: bool
) -> list[tuple[list[int], Any]]:
    """Ids and offsets (n, 2) of each text. A text with cuts is encoded in parts."""
    parts: list[str] = []
    starts: list[list[int]] = []
    for text in texts:
        cuts = [0, *(text.cuts if isinstance(text, Rendered) else ()), len(text)]
        pairs = itertools.pairwise(cuts)
        parts += [str(text[a:b]) for a, b in pairs]
        starts.append(cuts[:-1])
    encodings = iter(tokenizer.encodings(parts, wanted, controls=True))
    found = []
    for own in starts:
        tokens: list[int] = []
        offsets: list[Any] = []
        for start, encoding in zip(own, encodings, strict=False):
            tokens += encoding.ids
            if not wanted:
                offsets.append(np.zeros((len(encoding), 2), np.int64))
                continue
            flat = itertools.chain.from_iterable(encoding.offsets)
            places = np.fromiter(flat, np.int64, 2 * len(encoding))
            offsets.append(places.reshape(-1, 2) + start)
        found.append((tokens, np.concatenate(offsets)))
    return found


def _in_answers(offsets: NDArray[Any], answers: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Whether each token holds a part of an answer."""
    found = np.zeros(len(offsets), np.bool_)
    for start, stop in answers:
        found |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return found


def _signed(tokens: Tokens) -> bool:
    return tokens.dtype.kind == "i"
