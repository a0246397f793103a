"""Data of language modeling: text and token rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memconsole.plan.data.tags import chat_tags, cut_words
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.files import TOKENIZER_JSON, tokenizer_file
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.tasks.language import MASKED
from memconsole.runs.record.log import events
from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.sources.text_warnings import text_warnings
from memconsole_trainer.data.stream import BatchShape, Rows
from memconsole_trainer.data.text.opened import open_text
from memconsole_trainer.data.text.portion import boundary
from memconsole_trainer.data.text.prepared import Prepared, prepare
from memconsole_trainer.data.text.rows.batches import TextRows, language_batch
from memconsole_trainer.data.text.rows.rows import Other, Source
from memconsole_trainer.data.text.rows.validation import MOST_UNKNOWN
from memconsole_trainer.data.text.run_tokenizer import make_tokenizer
from memconsole_trainer.data.text.tokens.tokenizer import file_fingerprint
from memconsole_trainer.engine import Array, Batch, Engine, LossSum, Sampling
from memconsole_trainer.tasks.answering import (
    Answered,
    Asked,
    asked_records,
    score_model,
)
from memconsole_trainer.tasks.task import Judged, Start, Teller
from memconsole_trainer.weights.starting import weights_directory

SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_K = 50
_WIDER = "raise data.tokenizer_examples or data.vocab_size, or set data.characters = false"
"""What makes a tokenizer of characters know more text."""


class Opened(NamedTuple):
    """What `LanguageData` is made of."""

    plan: Plan
    architecture: Architecture
    prepared: Prepared
    tokenizer_hash: str
    asked: Asked | None = None


def open_data(
    plan: Plan, model: Model, directory: Path, say: Teller, known: Mapping[str, str]
) -> LanguageData:
    """Open the data of a run. Raises `PlanError` and `DataError`."""
    return LanguageData(*opened_text(plan, model, directory, say, known))


def opened_text(
    plan: Plan, model: Model, directory: Path, say: Teller, known: Mapping[str, str]
) -> Opened:
    """Open source, tokenizer, train rows and held-out rows of a run. Raises `PlanError` and
    `DataError`."""
    assert isinstance(model, Architecture)
    mixed = f", mixed with {plan.data.mix}" if plan.data.mix else ""
    say.phase("data", plan.data.source + mixed)
    opened = open_text(plan, model.vocab_size, say.tick)
    for part in (*opened.trained, *(opened.held if opened.own_validation else ())):
        if not isinstance(part.source, TokenRows):
            for warning in text_warnings(part.plan.data.source, part.source):
                say.warning(warning)
        say.tick()
    say.phase("tokenizer")
    beside = weights_directory(plan)
    found_beside = None if beside is None else tokenizer_file(beside)
    saved = directory / TOKENIZER_JSON
    tokenizer = make_tokenizer(
        plan, model, opened, saved, found_beside, known.get("tokenizer", ""), say.warning
    )
    if tokenizer is not None:
        cut = [tag for tag in chat_tags(plan) if not tokenizer.reads_whole(tag)]
        if cut:
            say.warning(cut_words(plan, cut))
    say.phase("data", "measuring")
    counts = directory / "data.json"
    found = prepare(plan, model, opened, tokenizer, counts, say.tick, say.warning)
    if opened.own_validation and not len(found.validation):
        say.warning(f"data.validation = {plan.data.validation}: holds nothing to validate on")
    elif plan.data.validation_fraction and not len(found.validation):
        say.warning("nothing is held out for validation: the data is a single document")
    for warning in found.warnings:
        say.warning(warning)
    if (share := found.validation.unknown_share) > MOST_UNKNOWN:
        trained = plan.data.tokenizer is None and found_beside is None
        say.warning(
            f"{share:.1%} of the held-out tokens are text that the tokenizer does not know, so bits "
            f"per byte are not reported: {_WIDER if trained else 'give another data.tokenizer'}"
        )
    if isinstance(opened.first.source, TokenRows) and tokenizer is None:
        say.warning("rows of tokens without data.tokenizer: samples are shown as token ids")
    asked = asked_records(plan, model, opened, tokenizer) if tokenizer is not None else None
    return Opened(plan, model, found, file_fingerprint(saved) if tokenizer else "", asked)


class LanguageData:
    """Implements `TaskData`."""

    def __init__(
        self,
        plan: Plan,
        architecture: Architecture,
        prepared: Prepared,
        tokenizer_hash: str,
        asked: Asked | None = None,
    ) -> None:
        self._asked = asked
        self._first: Answered | None = None
        self.answered_records = len(asked.held.records) if asked is not None else 0
        self._plan, self._architecture, self._prepared = plan, architecture, prepared
        self._boundary = boundary(plan, prepared.tokenizer)
        self._unigram: float | None = None
        self._target_bytes: int | None = None
        self.description = prepared.description
        self.fingerprints: Mapping[str, str] = {
            "data": prepared.fingerprint,
            "tokenizer": tokenizer_hash,
        }
        self.hashes = prepared.hashes
        self.validation_rows = len(prepared.validation)

    def fitted(self, model: Model) -> Model:
        return model

    def measure_start(self, start: Start, say: Teller) -> None:
        """Nothing needs to be known."""

    def rows(self, shuffle_buffer: int | None = None) -> Rows:
        plan = self._plan
        first, *others = self._prepared.portions
        mixed = [Other(Source(portion.blocks, portion.held), portion.share) for portion in others]
        buffer, seed = shuffle_buffer, plan.train.seed
        if buffer is None:
            buffer = plan.data.shuffle_buffer
        return TextRows(first.blocks, seed, buffer, first.held, self._boundary, mixed)

    def steps_per_epoch(self, shape: BatchShape) -> int:
        return self._prepared.steps_per_epoch(shape)

    def validation(self, shape: BatchShape, limit: int) -> Iterator[Batch]:
        return self._prepared.validation.batches(shape, limit)

    def judged(
        self,
        total: LossSum,
        shape: BatchShape,
        limit: int,
        engine: Engine,
        tick: Callable[[], None],
    ) -> Judged:
        """The baseline loss of the train tokens' unigram model, and the loss in bits per byte of
        text."""
        held = self._prepared.validation
        if self._unigram is None:
            self._unigram = held.unigram_loss(self._prepared.counts, shape, limit)
            self._target_bytes = held.target_bytes(shape, limit)
        covered = self._target_bytes
        bits = total.loss / math.log(2) / covered if covered else None
        return Judged({"unigram_loss": self._unigram}, bits)

    def answered(self, engine: Engine, tick: Callable[[], None]) -> dict[str, float]:
        """Exact match and token F1 of the answers to held-out records, and those of two baselines."""
        if self._asked is None:
            return {}
        found, self._first = score_model(self._asked.answerer, self._asked.held, engine, tick)
        return found

    def longest(self, first: Batch | None, shape: BatchShape) -> Batch:
        inputs: Array
        targets: Array
        documents: Array | None = None
        if first is None:
            vocabulary = self._architecture.vocab_size
            tokens = np.arange(shape.rows * shape.sequence_length, dtype=np.int32) % vocabulary
            inputs = targets = tokens.reshape(shape.rows, shape.sequence_length)
            documents = np.zeros_like(inputs) if self._boundary is not None else None
        else:
            rows = {name: a.reshape(-1, a.shape[-1]) for name, a in first.arrays.items()}
            wanted = np.arange(shape.rows) % len(rows["inputs"])
            inputs, targets = rows["inputs"][wanted], rows["targets"][wanted]
            targets = np.where(targets == MASKED, inputs, targets)
            documents = rows["documents"][wanted] if "documents" in rows else None
        dimensions = (shape.micro_batches, shape.micro_batch, shape.sequence_length)
        own = None if documents is None else documents.reshape(dimensions)
        return language_batch(inputs.reshape(dimensions), targets.reshape(dimensions), own)

    def room_for_sample(self) -> bool:
        return self._asked is not None or self._sample_tokens() > 0

    def sample(self, engine: Engine, step: int) -> events.Sample | None:
        """Text that continues the beginning of the first held-out document; of records, the answer
        to the first one."""
        if self._first is not None:
            return events.Sample(step=step, prompt=self._first.prompt, text=self._first.text)
        tokens, prompt = self._sample_tokens(), self._prompt()
        if tokens <= 0:
            return None
        tokenizer, seed = self._prepared.tokenizer, self._plan.train.seed + step
        stops = tokenizer.stops() if tokenizer is not None else ()
        drawn = Sampling(SAMPLE_TEMPERATURE, SAMPLE_TOP_K, seed=seed, stop=stops)
        ids = engine.generate(prompt, tokens, drawn)
        if tokenizer is None:
            words = [" ".join(map(str, part)) for part in (prompt, ids)]
        else:
            words = [tokenizer.decode(prompt), tokenizer.continuation(prompt, ids)]
        return events.Sample(step=step, prompt=words[0], text=words[1])

    def _prompt(self) -> list[int]:
        tokenizer = self._prepared.tokenizer
        return self._prepared.validation.prompt or (tokenizer.prompt("") if tokenizer else [0])

    def _sample_tokens(self) -> int:
        room = self._architecture.max_positions - len(self._prompt()) - 1
        return min(self._plan.train.sample_tokens, room)
