"""Counts the train tokens and how often each occurs, or estimates both from a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from memconsole import regular_file, typed_json
from memconsole.plan.plan import Plan, PlanError
from memconsole.runs.record.files import write_atomic
from memconsole_trainer.data.sources.documents import Documents, StreamDocuments
from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.text.blocks.text_blocks import TextBlocks
from memconsole_trainer.data.text.tokens.marked import learned
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, Tokens
from memconsole_trainer.data.text.tokens.tokens import RowBlocks, TokenBlocks

EXACT_BYTES = 4 << 20
"""Text up to this size is counted exactly; of longer text, a spread sample is counted."""
SAMPLED_BLOCKS = 128
CACHE_BYTES = 256 << 20
"""Counts of the largest vocabulary take less."""


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts, stored in the run so that a resumed attempt has the same totals without
    counting again."""

    key: str
    train_tokens: int
    exact: bool
    counts: list[int]
    """Occurrences of each token id that is learned in the counted text."""


def measure(
    plan: Plan,
    vocab_size: int,
    source: Documents | TokenRows,
    blocks: TokenBlocks,
    tokenizer: Tokenizer | None,
    cache: Path,
    tick: Callable[[], None],
) -> TokenCounts:
    """Measure `blocks`, or read the result from `cache` if it is of the same data. Calls `tick`
    often.

    Raises `PlanError` for a stream of unknown length if the plan does not limit it.
    """
    words: tuple[object, ...] = (
        source.fingerprint,
        tokenizer and tokenizer.fingerprint,
        msgspec.structs.replace(plan.data, cache_gib=0),  # it changes no token
        plan.train.max_steps,
    )
    if isinstance(blocks, TextBlocks) and blocks.left_out:
        words = (*words, sorted(blocks.left_out))
    key = hashlib.sha256(repr(words).encode()).hexdigest()
    try:
        known = typed_json.decode(regular_file.read(cache, CACHE_BYTES), TokenCounts)
        if known.key == key:
            return known
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    counts = np.zeros(vocab_size, dtype=np.int64)
    whole = _whole(source, blocks)
    seen = 0
    for tokens in blocks.iterate(0) if whole else _sample(blocks):
        counts += np.bincount(learned(tokens), minlength=vocab_size)
        seen += len(tokens)
        tick()
    if isinstance(blocks, RowBlocks):
        total, exact = blocks.train_tokens(), True
    elif whole:
        total, exact = seen, True
    else:
        assert isinstance(blocks, TextBlocks)
        assert not isinstance(source, TokenRows)
        total, exact = _extrapolated(plan, source, blocks, seen)
    found = TokenCounts(key=key, train_tokens=total, exact=exact, counts=counts.tolist())
    write_atomic(cache, msgspec.json.encode(found), durable=False)
    return found


def _whole(source: Documents | TokenRows, blocks: TokenBlocks) -> bool:
    if blocks.count is None:
        return False
    size = None if isinstance(source, TokenRows) else source.total_bytes
    return blocks.count <= SAMPLED_BLOCKS or (size is not None and size <= EXACT_BYTES)


def _sample(blocks: TokenBlocks) -> Iterator[Tokens]:
    """Yield evenly spaced blocks; of a stream, the first ones."""
    if blocks.count is None:
        for _, tokens in zip(range(SAMPLED_BLOCKS), blocks.iterate(0), strict=False):
            yield tokens
        return
    indices = np.linspace(0, blocks.count - 1, SAMPLED_BLOCKS).round().astype(int).tolist()
    while indices:
        now = blocks.together
        yield from blocks.several(indices[:now])
        del indices[:now]


def _extrapolated(plan: Plan, source: Documents, blocks: TextBlocks, seen: int) -> tuple[int, bool]:
    """Extrapolate the total of train tokens from those seen. Also returns whether the total is
    exact."""
    train_bytes = blocks.train_bytes()
    if train_bytes is not None and blocks.seen.train_bytes:
        return round(seen / blocks.seen.train_bytes * train_bytes), False
    if blocks.count is not None:
        return round(seen / SAMPLED_BLOCKS * blocks.count), False
    assert isinstance(source, StreamDocuments)
    looked_at = SAMPLED_BLOCKS * source.block_size
    documents = blocks.seen.documents
    if documents < looked_at:
        return seen, True
    if source.expected_count is not None:
        return round(seen / documents * source.expected_count), False
    if plan.train.max_steps is None:
        raise PlanError(
            f"{plan.data.source}: a stream of unknown length; "
            "set train.max_steps or data.max_examples",
            "train.max_steps",
        )
    return plan.train.max_steps * plan.tokens_per_step, False
