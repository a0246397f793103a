"""The tokenizer of a run: the saved one, the plan's, the one beside the model, or a new one trained on the data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from memconsole.plan.data.added_tokens import left_out_words
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.templates.choice import template_of
from memconsole_trainer.data.sources.documents import Documents, StreamDocuments
from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.sources.split import Split
from memconsole_trainer.data.spread import even_rows, spread_order
from memconsole_trainer.data.text.blocks.record_blocks import frequent_codes
from memconsole_trainer.data.text.opened import TextPart, TextSources
from memconsole_trainer.data.text.tokens import tokenizer as tokenizers
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer

CODES_SHARE = 4
"""Codes that become one token take at most 1 / this of a vocabulary."""
TOKENIZER_BYTES = 4 << 20
"""The tokenizer is trained on at most this much text, even if `data.tokenizer_examples` allows
more."""
LOOKED_AT = 4
"""For each document that a tokenizer learns from, at most this many are read, because some may hold no text."""


def make_tokenizer(
    plan: Plan,
    architecture: Architecture,
    opened: TextSources,
    saved: Path,
    beside_model: Path | None,
    known: str = "",
    warn: Callable[[str], None] = lambda warning: None,
) -> Tokenizer | None:
    """The run's tokenizer; None for token rows without one.

    It is, in this order: the one `saved` in the run, the plan's, the file beside the model's
    weights, or one trained on the data. A new one is written to `saved`.

    `known` is the hash of the run's tokenizer file in its checkpoint, if there is one. A damaged file is
    made again from its origin. Raises `PlanError` and `DataError`.
    """
    kept = _intact(saved, architecture, known, warn) if saved.is_file() else None
    if kept is not None:
        _tell_sampled(kept, warn)
        return kept
    chosen = Path(plan.data.tokenizer).expanduser() if plan.data.tokenizer else beside_model
    if chosen is not None:
        tokenizer = tokenizers.load(chosen, architecture.vocab_size)
        if tokenizer.beyond:
            warn(left_out_words(tokenizer.beyond, architecture.vocab_size))
    elif isinstance(opened.first.source, TokenRows):
        return None
    else:
        size = min(plan.data.vocab_size or architecture.vocab_size, architecture.vocab_size)
        if size < 257 and not plan.data.characters:
            raise PlanError(
                f"the model's vocabulary holds {size}; a byte-level tokenizer needs at least 257; "
                "data.characters = true needs fewer",
                "data.vocab_size",
            )
        template = template_of(plan)
        make = tokenizers.of_characters if plan.data.characters else tokenizers.train
        tokenizer = make(
            _learned_texts(plan, opened),
            size,
            lowercase=plan.data.lowercase,
            tags=template.tags if template is not None else (),
            codes=frequent_codes(
                opened.first.source, opened.first.split, plan.data.code_field, size // CODES_SHARE
            ),
        )
    if known in ("", tokenizer.fingerprint):
        tokenizer.save(saved)
    _tell_sampled(tokenizer, warn)
    return tokenizer


def _intact(
    saved: Path, architecture: Architecture, known: str, warn: Callable[[str], None]
) -> Tokenizer | None:
    """The tokenizer in `saved`; None if the file is damaged, after a warning."""
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


def _learned_texts(plan: Plan, opened: TextSources) -> Iterator[str]:
    """Yield train documents of each source that hold text, by its share."""
    for part in opened.trained:
        examples = max(1, round(plan.data.tokenizer_examples * part.share))
        yield from _of_part(part, examples, int(TOKENIZER_BYTES * part.share))


def _of_part(part: TextPart, examples: int, most_size: int) -> Iterator[str]:
    assert not isinstance(part.source, TokenRows)
    size = 0
    found = filter(None, _train_texts(part.source, part.split, LOOKED_AT * examples))
    for text in itertools.islice(found, examples):
        yield text
        size += len(text)
        if size >= most_size:
            return


def _train_texts(source: Documents, split: Split, most: int) -> Iterator[str]:
    """Yield `most` train documents at even distances, of which the first ones, however many, are spread over all; of a
    stream, its train documents in order."""
    if isinstance(source, StreamDocuments):
        for number, text in enumerate(source.iterate()):
            if not split.held_out(number, number + 1)[0]:
                yield text
        return
    numbers = split.numbers(source.count or 0, held=False)
    chosen = numbers[even_rows(len(numbers), most)]
    for number in chosen[spread_order(len(chosen))].tolist():
        yield source.read(number, number + 1)[0]
