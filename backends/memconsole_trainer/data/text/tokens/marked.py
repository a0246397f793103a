"""Tokens with a mark that says whether their loss counts: a token that is only an input is stored as its bitwise
complement.

`~id` is negative, so the sign is the loss mask, and blocks, rows and queues of tokens need no second
array. The value of `pad` fills the end of a row that has no room for another document.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.tasks.language import MASKED
from memconsole.plan.templates.rendered import Rendered
from memconsole_trainer.data.text.tokens.tokenizer import (
    Tokenizer,
    Tokens,
    as_array,
    byte_length,
    token_dtype,
)


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
    kept = np.flatnonzero(row != pad(row))
    return row[: int(kept[-1]) + 1 if len(kept) else 0]


def ids(tokens: Tokens) -> Tokens:
    """The token ids without their marks."""
    return np.where(tokens < 0, ~tokens, tokens) if _signed(tokens) else tokens


def learned(tokens: Tokens) -> Tokens:
    """The ids of the tokens that are learned."""
    return tokens[tokens >= 0] if _signed(tokens) else tokens


def only_read(tokens: Tokens) -> Tokens:
    """The tokens with a mark that says that they are not learned. Padding stays padding."""
    found: Tokens = np.minimum(tokens, ~tokens)
    return found


def marked_rows(rows: NDArray[np.int32], tokenizer: Tokenizer | None) -> NDArray[np.int32]:
    """Rows (n, width) of token ids and `MASKED`, with marks. The tokens were made by `tokenizer`, if known.

    The run of pad tokens at the end of a row becomes padding. If the pad token is also the end-of-text token,
    the first one of the run ends a text and stays. `MASKED` becomes padding at the end of a row; elsewhere the
    model reads the pad token in its place, else the end-of-text token, else token 0.
    """
    pad_id, end = (None, None) if tokenizer is None else (tokenizer.pad, tokenizer.end_of_text)
    masked = rows == MASKED
    if pad_id is None and not masked.any():
        return rows
    padding = runs_at_end(masked | (rows == pad_id))
    if pad_id is not None and pad_id == end:
        padding[:, 1:] &= padding[:, :-1] | masked[:, 1:]
    read = next((i for i in (pad_id, end) if i is not None), 0)
    return np.where(padding, pad(rows), np.where(masked, ~np.int32(read), rows))


def runs_at_end(found: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of the true values of each row (n, width), those of the run at its end."""
    runs: NDArray[np.bool_] = np.logical_and.accumulate(found[:, ::-1], axis=1)[:, ::-1]
    return runs


def narrowed(tokens: NDArray[np.int32], largest_id: int) -> Tokens:
    """Marked tokens in the smallest type. Ids that fit into 16 bits only without a mark take 32 bits if there
    are marks."""
    dtype = marked_dtype(largest_id)
    if (tokens < 0).any():
        return np.maximum(tokens, np.iinfo(dtype).min).astype(dtype)
    return tokens.astype(dtype if dtype is np.int16 else token_dtype(largest_id + 1))


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
    written them; none for a text without tokens of its own. With `answers_only` only the tokens of answers are learned, and
    the end-of-text token if the text ends with an answer. Messages that are only read are not learned, nor the end-of-text
    token after one. Offsets are found only if `offsets` is set, because that takes the library
    a third longer."""
    found = []
    dtype = marked_dtype(tokenizer.largest_id)
    begin, end = list(tokenizer.begin), tokenizer.end_of_text
    controls = frozenset(tokenizer.special_ids if answers_only else ())
    for text, (tokens, places) in zip(texts, _encoded(tokenizer, texts, offsets), strict=True):
        if not tokens:
            found.append(Encoded(as_array([], dtype), _EMPTY))
            continue
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
        if isinstance(text, Rendered) and (answers_only or text.only_read):
            marked = ~whole if answers_only else whole.copy()
            body, learned = whole[own : own + count], marked[own : own + count]
            for part in _spans(tokenizer, text, text.answers, body) if answers_only else ():
                learned[part] = body[part]
            for part in _spans(tokenizer, text, text.only_read, body):
                learned[part] = ~body[part]
            if not ended and text.ends_with_answer:
                marked[-1] = whole[-1]
                last = np.flatnonzero(learned >= 0)[-1:].tolist()
                if answers_only and last and int(body[last[0]]) not in controls:
                    # No control token ends the answer: what leads to the end-of-text token is learned too.
                    learned[last[0] :] = body[last[0] :]
            if not ended and text.ends_only_read:
                marked[-1] = ~whole[-1]
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


def _spans(
    tokenizer: Tokenizer, text: Rendered, places: Sequence[tuple[int, int]], tokens: Tokens
) -> list[slice]:
    """The tokens of each place (start and end in characters) among the text's own tokens. A token that holds a part of a
    place belongs to it. Where a token is follows from the bytes that each token stands for, or from its offsets if these
    bytes are not known."""
    if not places:
        return []
    inside, stops = _in_bytes(text, places), _byte_stops(tokenizer, text, tokens)
    starts = stops
    if stops is None or starts is None:
        offsets = _encoded(tokenizer, [text], True)[0][1]
        assert offsets is not None
        inside, (starts, stops) = places, np.maximum.accumulate(offsets).T
        starts = starts[1:]
    return [
        slice(
            int(stops.searchsorted(first, "right")),
            min(int(starts.searchsorted(last, "left")) + 1, len(tokens)),
        )
        for first, last in inside
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


def _in_bytes(text: str, places: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Places that are in characters, in bytes."""
    if text.isascii():
        return places
    return [(byte_length(text[:a]), byte_length(text[:b])) for a, b in places]


def _signed(tokens: Tokens) -> bool:
    return tokens.dtype.kind == "i"
