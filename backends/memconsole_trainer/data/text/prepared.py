"""Prepares the text data of one run: the train tokens of its sources, and its validation rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.data.counted import keep_counted
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole_trainer.data.sources.hashes import DataHashes
from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text.blocks.pair_blocks import held_out_pairs
from memconsole_trainer.data.text.blocks.record_blocks import held_out_records
from memconsole_trainer.data.text.opened import TextPart, TextSources
from memconsole_trainer.data.text.portion import Portion, boundary, prepare_part
from memconsole_trainer.data.text.rows import validation
from memconsole_trainer.data.text.rows.validation import MOST_TOKENS, Validation
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prepared:
    """The prepared data of one run."""

    tokenizer: Tokenizer | None
    """None for token rows without a tokenizer."""
    portions: tuple[Portion, ...]
    """The training data: `data.source`, and the sources that are mixed with it."""
    validation: Validation
    fingerprint: str
    hashes: DataHashes

    @property
    def counts(self) -> NDArray[np.int64]:
        """Occurrences of each token id in the training data, or in a sample of it."""
        first, *others = self.portions
        if not others:
            return first.counts
        whole = first.counts.sum() / first.share
        parts = [p.counts * (p.share * whole / max(p.counts.sum(), 1)) for p in self.portions]
        found: NDArray[np.int64] = np.sum(parts, axis=0).round().astype(np.int64)
        return found

    @property
    def description(self) -> str:
        mixed = len(self.portions) > 1
        parts = [
            f"{p.share:.1%} {p.description}" if mixed else p.description for p in self.portions
        ]
        return f"{'; '.join(parts)}, {self.validation.tokens:,} held out"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the data for the user."""
        trained = tuple(warning for portion in self.portions for warning in portion.warnings)
        return trained + self.validation.warnings

    def steps_per_epoch(self, shape: BatchShape) -> int:
        """Optimizer steps of one epoch, a pass over `data.source`; an estimate unless its tokens were
        counted, or for a mixture."""
        rows = round(self.portions[0].rows / self.portions[0].share)
        return max(1, -(-rows // shape.rows))


def prepare(
    plan: Plan,
    architecture: Architecture,
    opened: TextSources,
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
    kept = held_out(plan, architecture, opened, tokenizer)
    tick()
    left_out = opened.left_out()
    portions = []
    for number, part in enumerate(opened.trained):
        file = cache.with_stem(f"{cache.stem}-{number}") if number else cache
        portions.append(prepare_part(part, architecture, tokenizer, left_out, file, tick, warn))
    if portions[0].exact:
        keep_counted(plan, portions[0].rows * plan.rows_together * plan.stride)
    return Prepared(tokenizer, tuple(portions), kept, opened.fingerprint, opened.hashes)


def held_out(
    plan: Plan, architecture: Architecture, opened: TextSources, tokenizer: Tokenizer | None
) -> Validation:
    """The rows held out from training. Raises `PlanError`, and `DataError` for pairs without an answer."""
    found = [_held_out(part, architecture, tokenizer) for part in opened.held]
    return dataclasses.replace(
        validation.joined(found, [part.share for part in opened.held]),
        boundary=boundary(plan, tokenizer),
        unknown=None if tokenizer is None else tokenizer.unknown,
    )


def _held_out(
    part: TextPart, architecture: Architecture, tokenizer: Tokenizer | None
) -> Validation:
    """The held-out rows of one source."""
    plan, source, split = part.plan, part.source, part.split
    length, most = plan.data.sequence_length, int(MOST_TOKENS * part.share)
    if isinstance(source, TokenRows):
        row_tokens, size = min(source.width, length + 1), architecture.vocab_size
        return validation.from_rows(source, split, size, row_tokens, tokenizer, most)
    assert tokenizer is not None
    if plan.data.template is not None:
        if plan.learns_pairs:
            return held_out_pairs(source, split, tokenizer, length, most)
        return held_out_records(source, split, tokenizer, length, plan.learns_answers, most)
    return validation.from_texts(source, split, tokenizer, length, most)
