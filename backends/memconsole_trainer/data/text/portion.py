"""The train tokens of one source: blocks, counts, and all tokens if they are held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.data.unwritten import role_words, unwritten_words
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.templates.chat import LEARNED, REASONING, TOOLS
from memconsole_trainer.data.sources.documents import DataError, Documents
from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.text.blocks.pair_blocks import PairBlocks
from memconsole_trainer.data.text.blocks.record_blocks import RecordBlocks
from memconsole_trainer.data.text.blocks.text_blocks import TextBlocks
from memconsole_trainer.data.text.blocks.token_key import open_cache
from memconsole_trainer.data.text.measure import measure
from memconsole_trainer.data.text.opened import TextPart
from memconsole_trainer.data.text.rows.batches import Boundary
from memconsole_trainer.data.text.tokens.marked import learned
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, Tokens
from memconsole_trainer.data.text.tokens.tokens import RowBlocks, TokenBlocks, row_count

JOINED_BYTES = 16 << 20
"""Bytes of tokens that are collected before they are added to the array of all tokens."""
PADDING_SHARE = 0.1
"""A larger share of one token repeated at the ends of rows is warned of."""
COUNTED = 1 << 20
"""Tokens counted in one call of NumPy."""


@dataclass(frozen=True)
class Portion:
    """The train tokens of one source."""

    blocks: TokenBlocks
    share: float
    """The share of the training rows that comes from this source."""
    held: Tokens | None
    """All train tokens if they are kept in memory instead of streamed."""
    counts: NDArray[np.int64]
    """Occurrences of each token id in the train tokens, or in a sample of them."""
    train_tokens: int
    exact: bool
    description: str
    warnings: tuple[str, ...]
    """Warnings about the data for the user."""

    @property
    def rows(self) -> int:
        """Rows of one pass; an estimate unless `exact`."""
        return row_count(self.train_tokens, self.blocks.row_tokens, self.blocks.stride)


def prepare_part(
    part: TextPart,
    architecture: Architecture,
    tokenizer: Tokenizer | None,
    left_out: frozenset[int],
    cache: Path,
    tick: Callable[[], None],
    warn: Callable[[str], None],
) -> Portion:
    """Count or read the train tokens of a source. `cache` is the file of the run that keeps the
    counts. Raises `PlanError` and `DataError`."""
    plan, source, size = part.plan, part.source, architecture.vocab_size
    blocks = _blocks(part, size, tokenizer, left_out, cache.parent, warn)
    held = None
    if plan.data.streaming:
        found = measure(plan, size, source, blocks, tokenizer, cache, tick)
        counts = np.asarray(found.counts, dtype=np.int64)
        train_tokens, exact = found.train_tokens, found.exact
    else:
        held = _all_tokens(blocks, tick)
        counts = _counts(held, size)
        train_tokens, exact = len(held), True
    if train_tokens < 2:
        except_for = " beside the documents that data.validation holds too" if left_out else ""
        raise DataError(f"{plan.data.source}: holds no text to train on{except_for}")
    if not counts.any():
        raise DataError(f"{plan.data.source}: {_nothing_learned(plan, source, exact)}")
    documents = "a stream" if source.count is None else f"{source.count:,} documents"
    return Portion(
        blocks=blocks,
        share=part.share,
        held=held,
        counts=counts,
        train_tokens=train_tokens,
        exact=exact,
        description=(
            f"{plan.data.source}: {documents}, {'' if exact else 'about '}{train_tokens:,} train tokens"
        ),
        warnings=_warnings(plan, blocks),
    )


def boundary(plan: Plan, tokenizer: Tokenizer | None) -> Boundary | None:
    """How to tell documents apart, or None if the plan does not isolate documents. Raises
    `PlanError` if it does and the tokenizer has no end-of-text token.

    A text without a begin token of its own begins after the end-of-text token, as does a sample without a prompt. A
    record begins with its template's text, as does the question that a model answers.
    """
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
    end = tokenizer.end_of_text
    return Boundary(end, plan.data.template is None and set(tokenizer.begin) <= {end})


def _blocks(
    part: TextPart,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    left_out: frozenset[int],
    directory: Path,
    warn: Callable[[str], None],
) -> TokenBlocks:
    """The source in blocks of tokens. Raises `PlanError` for rows shorter than the plan's."""
    plan, source, split = part.plan, part.source, part.split
    length = plan.data.sequence_length
    if isinstance(source, TokenRows):
        if source.width < length:
            raise PlanError(
                f"data.sequence_length = {length}: the rows of {source.path} hold {source.width} "
                f"tokens; use {source.width - 1} (a row needs one token more than the sequence)",
                "data.sequence_length",
            )
        row_tokens = min(source.width, length + 1)
        return RowBlocks(source, split, vocab_size, row_tokens, plan.stride, tokenizer)
    assert tokenizer is not None
    if plan.data.template is not None:
        blocks: TextBlocks
        if plan.learns_pairs:
            blocks = PairBlocks(source, split, tokenizer, length)
        else:
            answers_only, between = plan.learns_answers, boundary(plan, tokenizer)
            blocks = RecordBlocks(source, split, tokenizer, length, answers_only, between)
    else:
        blocks = TextBlocks(source, split, tokenizer, length, plan.stride)
    blocks.left_out = left_out
    blocks.cache = open_cache(plan, source, blocks, tokenizer, directory, warn)
    return blocks


def _nothing_learned(plan: Plan, source: Documents | TokenRows, exact: bool) -> str:
    """Why no token of the train documents is learned, and what is allowed."""
    documents = "train documents" if exact else "train documents looked at"
    if plan.data.template is not None and plan.learns_answers:
        assert not isinstance(source, TokenRows)
        setting = (
            f"train.objective = {plan.train.objective}"
            if plan.learns_pairs
            else "data.loss_on = answers"
        )
        texts = source.read(0, min(source.block_size, source.count or source.block_size))
        if any(getattr(text, "only_read", ()) for text in texts):
            return (
                f"the answers of the {documents} are marked as not learned ({', '.join(LEARNED)} of a message), and "
                f"{setting} learns nothing else"
            )
        if plan.learns_pairs:
            return (
                f"the answers of each of the {documents} are equal, or not within data.sequence_length = "
                f"{plan.data.sequence_length:,} tokens, and {setting} learns nothing else; expected other pairs, longer rows, or "
                "shorter prompts"
            )
        return (
            f"the {documents} hold no answer, and {setting} learns nothing else; expected messages of the "
            "assistant, or text between {% generation %} and {% endgeneration %}; data.loss_on = all learns all of a text"
        )
    return f"every token of the {documents} is marked as one that is not learned"


def _warnings(plan: Plan, blocks: TokenBlocks) -> tuple[str, ...]:
    """Warnings from counting the blocks."""
    if isinstance(blocks, RowBlocks):
        share, token = blocks.repeated_at_end()
        if share <= PADDING_SHARE:
            return ()
        return (
            f"{plan.data.source}: {share:.0%} of the tokens looked at repeat token {token} at the ends of rows, and are "
            "trained on; if that is padding, name it as pad_token in the tokenizer_config.json of data.tokenizer",
        )
    if not isinstance(blocks, TextBlocks):
        return ()
    seen = blocks.seen
    found = seen.cuts.warnings(plan.data.sequence_length)
    for part, count in ((TOOLS, seen.tools), (REASONING, seen.reasoning)):
        if count:
            whose = f"{count:,} of {seen.cuts.documents:,} records have"
            found += (unwritten_words(plan, whose, part),)
    for roles, written in ((seen.unwritten_roles, False), (seen.unknown_roles, True)):
        if roles.records:
            whose = f"{roles.records:,} of {seen.cuts.documents:,} records have"
            found += (role_words(plan, whose, roles.names, written),)
    if seen.left_out:
        found += (
            f"{plan.data.source}: {seen.left_out:,} of the {seen.documents:,} documents looked at are also in "
            "data.validation; such documents are not trained on",
        )
    return found


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
    """`whole` followed by `parts`, which are taken from the list. Those with marks may have a larger type."""
    if whole is None:
        whole = np.empty(0, parts[0].dtype if parts else np.uint16)
    whole = whole.astype(np.result_type(whole, *parts), copy=False)
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
