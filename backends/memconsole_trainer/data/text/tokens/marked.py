"""Tokens with a mark that says whether their loss counts: a token that is only an input is stored as its bitwise
complement.

`~id` is negative, so the sign is the loss mask, and blocks, rows and queues of tokens need no second
array. `PAD` fills the end of a row that has no room for another document.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.templates.rendered import Rendered
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, Tokens, as_array, byte_length


def marked_dtype(largest_id: int) -> type[np.int16] | type[np.int32]:
    """int16 if it holds every id with a mark, else int32."""
    return np.int16 if largest_id < np.iinfo(np.int16).max else np.int32


def pad(tokens: Tokens) -> int:
    """The padding value in the type of `tokens`, which stands for no token."""
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


_EMPTY = np.zeros((0, 2), np.int64)


class Encoded(NamedTuple):
    """A text's marked tokens, and if requested the offsets (n, 2) of their first and last character, without
    those of an added end-of-text token."""

    tokens: Tokens
    offsets: NDArray[np.int64]


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], answers_only: bool, offsets: bool = True
) -> list[Encoded]:
    """Each text's tokens, marked, with the tokens that begin and end a text unless the template has
    written them. With `answers_only` only the tokens of answers are learned, and the end-of-text token if
    the text ends with an answer. Offsets are found only if `offsets` is set, because that takes the library
    a third longer."""
    found = []
    dtype = marked_dtype(tokenizer.largest_id)
    begin, end = list(tokenizer.begin), tokenizer.end_of_text
    for text, (tokens, places) in zip(texts, _encoded(tokenizer, texts, offsets), strict=True):
        own, count, places = len(begin), len(tokens), _EMPTY if places is None else places
        if tokens[:own] == begin:
            own = 0
        else:
            tokens = [*begin, *tokens]
            if offsets:
                places = np.concatenate([np.zeros((own, 2), np.int64), places])
        # Templates of chats often write a line break after the end of the last message.
        ended = end is None or end in tokens[-2 if text[-1:].isspace() else -1 :]
        whole: Tokens = as_array(tokens if ended or end is None else [*tokens, end], dtype)
        if answers_only and isinstance(text, Rendered):
            marked = ~whole
            for first, last in _answers(tokenizer, text, whole[own : own + count]):
                marked[own + first : own + last] = whole[own + first : own + last]
            if not ended and text.ends_with_answer:
                marked[-1] = whole[-1]
            whole = marked
        found.append(Encoded(whole, places))
    return found


def _encoded(
    tokenizer: Tokenizer, texts: Sequence[str], wanted: bool
) -> list[tuple[list[int], NDArray[np.int64] | None]]:
    """Ids and, if wanted, offsets (n, 2) of each text. A text with cuts is encoded in parts."""
    parts: list[str] = []
    starts: list[list[int]] = []
    for text in texts:
        cuts = [0, *(text.cuts if isinstance(text, Rendered) else ()), len(text)]
        parts += [str(text[a:b]) for a, b in itertools.pairwise(cuts)]
        starts.append(cuts[:-1])
    encodings = iter(tokenizer.encodings(parts, wanted, controls=True))
    found: list[tuple[list[int], NDArray[np.int64] | None]] = []
    for own in starts:
        tokens: list[int] = []
        offsets: list[NDArray[np.int64]] = []
        for start, encoding in zip(own, encodings, strict=False):
            tokens += encoding.ids
            if wanted:
                flat = itertools.chain.from_iterable(encoding.offsets)
                places = np.fromiter(flat, np.int64, 2 * len(encoding))
                offsets.append(places.reshape(-1, 2) + start)
        found.append((tokens, np.concatenate(offsets) if wanted else None))
    return found


def _answers(tokenizer: Tokenizer, text: Rendered, tokens: Tokens) -> list[tuple[int, int]]:
    """The first token of each answer, and the token after its last one, among the text's own tokens. A token that holds
    a part of an answer belongs to it. The place of a token follows from the bytes that each token stands for, or from
    its offsets if these bytes are not known."""
    answers, stops = _answer_bytes(text), _byte_stops(tokenizer, text, tokens)
    starts = stops
    if stops is None or starts is None:
        places = _encoded(tokenizer, [text], True)[0][1]
        assert places is not None
        answers, (starts, stops) = text.answers, np.maximum.accumulate(places).T
        starts = starts[1:]
    return [
        (
            int(stops.searchsorted(first, "right")),
            min(int(starts.searchsorted(last, "left")) + 1, len(tokens)),
        )
        for first, last in answers
    ]


def _byte_stops(tokenizer: Tokenizer, text: str, tokens: Tokens) -> NDArray[np.int64] | None:
    """The byte of the text at which each token ends; None if the tokens may stand for other bytes than the text's, as
    those of a normalized text."""
    table = tokenizer.id_bytes
    if table is None or not len(tokens):
        return None
    if not (text.isascii() or tokenizer.inner.normalizer is None):
        return None
    stops = np.cumsum(table[tokens], dtype=np.int64)
    return stops if stops[-1] == byte_length(text) else None


def _answer_bytes(text: Rendered) -> Sequence[tuple[int, int]]:
    """Where each answer begins and ends, in bytes."""
    if text.isascii():
        return text.answers
    return [(byte_length(text[:a]), byte_length(text[:b])) for a, b in text.answers]


def _signed(tokens: Tokens) -> bool:
    return tokens.dtype.kind == "i"
