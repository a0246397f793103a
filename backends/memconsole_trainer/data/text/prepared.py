"""Prepares the text data of one run: tokenizer, train blocks, validation rows and token counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.templates.choice import template_of
from memconsole_trainer.data.sources.documents import (
    DataError,
    Documents,
    StreamDocuments,
)
from memconsole_trainer.data.sources.hashes import DataHashes
from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.sources.split import Split
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text import tokenizer as tokenizers
from memconsole_trainer.data.text import validation
from memconsole_trainer.data.text.marked import learned
from memconsole_trainer.data.text.measure import measure
from memconsole_trainer.data.text.record_blocks import (
    RecordBlocks,
    frequent_codes,
    held_out_records,
)
from memconsole_trainer.data.text.text_blocks import TextBlocks
from memconsole_trainer.data.text.token_key import open_cache
from memconsole_trainer.data.text.tokenizer import Tokenizer, Tokens
from memconsole_trainer.data.text.tokens import RowBlocks, TokenBlocks, row_count
from memconsole_trainer.data.text.validation import Validation

JOINED_BYTES = 16 << 20
"""Tokens are collected up to this size before they are added to those that are held."""
COUNTED = 1 << 20
"""Tokens counted in one call of NumPy."""
CODES_SHARE = 4
"""At most this part of a vocabulary are codes that are kept whole."""
TOKENIZER_BYTES = 4 << 20
"""The tokenizer is trained on at most this much text, even if `data.tokenizer_examples` allows
more."""


@dataclass(frozen=True)
class Prepared:
    """The prepared data of one run."""

    tokenizer: Tokenizer | None
    """None for token rows without a tokenizer."""
    blocks: TokenBlocks
    held: Tokens | None
    """All train tokens if they are kept in memory instead of streamed."""
    validation: Validation
    counts: NDArray[np.int64]
    """Occurrences of each token id in the train tokens, or in a sample of them."""
    train_tokens: int
    exact: bool
    fingerprint: str
    hashes: DataHashes
    description: str
    warnings: tuple[str, ...] = ()
    """What the person should know of the data."""

    def steps_per_epoch(self, shape: BatchShape) -> int:
        """Optimizer steps of one epoch; an estimate unless `exact`."""
        rows = row_count(self.train_tokens, self.blocks.row_tokens, self.blocks.stride)
        return max(1, -(-rows // shape.rows))


def make_tokenizer(
    plan: Plan,
    architecture: Architecture,
    source: Documents | TokenRows,
    split: Split,
    saved: Path,
    beside_model: Path | None,
    known: str = "",
    warn: Callable[[str], None] = lambda warning: None,
) -> Tokenizer | None:
    """The run's tokenizer; None for token rows without one.

    It is, in this order: the one `saved` in the run, the plan's, the file beside the model's
    weights, or one trained on the data. A new one is written to `saved`.

    `known` is the hash of the run's file in its checkpoint, if there is one. A file that is damaged
    is made again from where it came from. Raises `PlanError` and `DataError`.
    """
    kept = _intact(saved, architecture, known, warn) if saved.is_file() else None
    if kept is not None:
        _tell_sampled(kept, warn)
        return kept
    chosen = Path(plan.data.tokenizer).expanduser() if plan.data.tokenizer else beside_model
    if chosen is not None:
        tokenizer = tokenizers.load(chosen, architecture.vocab_size)
    elif isinstance(source, TokenRows):
        return None
    else:
        size = min(plan.data.vocab_size or architecture.vocab_size, architecture.vocab_size)
        if size < 257:
            raise PlanError(
                f"the model's vocabulary holds {size}; a byte-level tokenizer needs at least 257",
                "data.vocab_size",
            )
        template = template_of(plan)
        tokenizer = tokenizers.train(
            _first_texts(plan, source, split),
            size,
            lowercase=plan.data.lowercase,
            tags=template.tags if template is not None else (),
            codes=frequent_codes(source, split, plan.data.code_field, size // CODES_SHARE),
        )
    if known in ("", tokenizer.fingerprint):
        tokenizer.save(saved)
    _tell_sampled(tokenizer, warn)
    return tokenizer


def _intact(
    saved: Path, architecture: Architecture, known: str, warn: Callable[[str], None]
) -> Tokenizer | None:
    """The tokenizer in `saved`; None if the file is damaged, which is told."""
    if not known or tokenizers.file_fingerprint(saved) == known:
        try:
            return tokenizers.load(saved, architecture.vocab_size)
        except PlanError as error:
            problem = str(error)
    else:
        problem = f"{saved}: not the tokenizer of the run's checkpoint"
    warn(f"{problem}; it is damaged, and is made again")
    return None


def _tell_sampled(tokenizer: Tokenizer, warn: Callable[[str], None]) -> None:
    if tokenizer.sampled:
        warn(
            f"the tokenizer cuts words at random ({tokenizer.sampled}); training switches that off, "
            "so that a text always gives the same tokens"
        )


def boundary(plan: Plan, tokenizer: Tokenizer | None) -> int | None:
    """The token that ends a document, or None if the plan does not isolate documents. Raises
    `PlanError` if it does and the tokenizer has no such token."""
    if not plan.data.isolate_documents:
        return None
    if tokenizer is None or tokenizer.end_of_text is None:
        what = (
            "rows of tokens need data.tokenizer" if tokenizer is None else "the tokenizer has none"
        )
        raise PlanError(
            f"data.isolate_documents = true: needs an end-of-text token after documents; {what}",
            "data.isolate_documents",
        )
    return tokenizer.end_of_text


def prepare(
    plan: Plan,
    architecture: Architecture,
    source: Documents | TokenRows,
    split: Split,
    tokenizer: Tokenizer | None,
    cache: Path,
    tick: Callable[[], None],
    warn: Callable[[str], None] = lambda warning: None,
) -> Prepared:
    """Prepare blocks, validation rows and token counts. `tick` is called from time to time and may
    raise. `cache` is the file of the run that keeps the counts.

    Raises `PlanError` for rows shorter than the plan's, and `DataError` if there is nothing to
    train on.
    """
    length = plan.data.sequence_length
    blocks: TokenBlocks
    if isinstance(source, TokenRows):
        if source.width < length:
            raise PlanError(
                f"data.sequence_length = {length}: the rows of {source.path} hold {source.width} "
                f"tokens; use {source.width - 1} (a row needs one token more than the sequence)",
                "data.sequence_length",
            )
        size, row_tokens = architecture.vocab_size, min(source.width, length + 1)
        blocks = RowBlocks(source, split, size, row_tokens, plan.stride)
    elif plan.data.template is not None:
        assert tokenizer is not None
        answers_only, end = plan.data.loss_on == "answers", boundary(plan, tokenizer)
        blocks = RecordBlocks(source, split, tokenizer, length, answers_only, end)
        blocks.cache = open_cache(plan, source, blocks, tokenizer, cache.parent, warn)
    else:
        assert tokenizer is not None
        blocks = TextBlocks(source, split, tokenizer, length, plan.stride)
        blocks.cache = open_cache(plan, source, blocks, tokenizer, cache.parent, warn)
    kept = held_out(plan, architecture, source, split, tokenizer)
    tick()
    held = None
    if plan.data.streaming:
        found = measure(plan, architecture.vocab_size, source, blocks, tokenizer, cache, tick)
        counts = np.asarray(found.counts, dtype=np.int64)
        train_tokens, exact = found.train_tokens, found.exact
    else:
        held = _all_tokens(blocks, tick)
        counts = _counts(held, architecture.vocab_size)
        train_tokens, exact = len(held), True
    if train_tokens < 2:
        raise DataError(f"{plan.data.source}: holds no text to train on")
    documents = "a stream" if source.count is None else f"{source.count:,} documents"
    return Prepared(
        tokenizer=tokenizer,
        blocks=blocks,
        held=held,
        validation=kept,
        counts=counts,
        train_tokens=train_tokens,
        exact=exact,
        fingerprint=source.fingerprint,
        hashes=source.hashes,
        description=(
            f"{plan.data.source}: {documents}, {'' if exact else 'about '}{train_tokens:,} train "
            f"tokens, {kept.tokens:,} held out"
        ),
        warnings=blocks.seen.cuts.warnings(length) if isinstance(blocks, RecordBlocks) else (),
    )


def held_out(
    plan: Plan,
    architecture: Architecture,
    source: Documents | TokenRows,
    split: Split,
    tokenizer: Tokenizer | None,
) -> Validation:
    """The rows held out from training. Raises `PlanError`."""
    length, end = plan.data.sequence_length, boundary(plan, tokenizer)
    if isinstance(source, TokenRows):
        row_tokens = min(source.width, length + 1)
        found = validation.from_rows(source, split, architecture.vocab_size, row_tokens, tokenizer)
    elif plan.data.template is not None:
        assert tokenizer is not None
        answers_only = plan.data.loss_on == "answers"
        found = held_out_records(source, split, tokenizer, length, answers_only)
    else:
        assert tokenizer is not None
        found = validation.from_texts(source, split, tokenizer, length)
    return dataclasses.replace(found, boundary=end)


def _all_tokens(blocks: TokenBlocks, tick: Callable[[], None]) -> Tokens:
    """The tokens of all blocks in one array.

    The array grows by a few blocks at a time. The system moves the pages of a large array without a
    copy, so that the tokens are never held twice.
    """
    whole: Tokens | None = None
    parts: list[Tokens] = []
    waiting = 0
    for tokens in blocks.iterate(0):
        parts.append(tokens)
        waiting += tokens.nbytes
        if waiting >= JOINED_BYTES:
            whole, waiting = _grown(whole, parts), 0
        tick()
    return _grown(whole, parts) if parts or whole is None else whole


def _grown(whole: Tokens | None, parts: list[Tokens]) -> Tokens:
    """`whole` followed by `parts`, which are taken from the list."""
    if whole is None:
        whole = np.empty(0, parts[0].dtype if parts else np.uint16)
    end = len(whole)
    whole.resize(end + sum(map(len, parts)), refcheck=False)
    for tokens in parts:
        whole[end : end + len(tokens)] = tokens
        end += len(tokens)
    parts.clear()
    return whole


def _counts(tokens: Tokens, vocab_size: int) -> NDArray[np.int64]:
    """Count each token id, slice by slice, because NumPy makes a 64-bit copy of what it counts."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), COUNTED):
        part = learned(tokens[start : start + COUNTED])
        counts += np.bincount(part, minlength=vocab_size)
    return counts


def _first_texts(plan: Plan, source: Documents, split: Split) -> Iterator[str]:
    """Yield the first train documents, limited by `tokenizer_examples` and `TOKENIZER_BYTES`."""
    examples, size = plan.data.tokenizer_examples, 0
    for index, text in enumerate(_texts(source)):
        if split.held_out(index, index + 1)[0]:
            continue
        yield text
        examples -= 1
        size += len(text)
        if examples <= 0 or size >= TOKENIZER_BYTES:
            return


def _texts(source: Documents) -> Iterator[str]:
    if isinstance(source, StreamDocuments):
        yield from source.iterate()
        return
    count = source.count or 0
    for start in range(0, count, source.block_size):
        yield from source.read(start, min(start + source.block_size, count))
