"""Answers held-out records with the model, and scores the answers together with those of two simple baselines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole.plan.templates.chat import RecordError
from memconsole.plan.templates.question import Question
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.hashes import text_hash
from memconsole_trainer.data.sources.records import (
    Record,
    RecordDocuments,
    StreamRecords,
    rendered,
)
from memconsole_trainer.data.sources.split import Split
from memconsole_trainer.data.spread import even_rows, spread_order
from memconsole_trainer.data.text.opened import TextSources
from memconsole_trainer.data.text.rows.validation import held_out_numbers
from memconsole_trainer.data.text.tokens.marked import encode, ids
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer
from memconsole_trainer.engine import GREEDY, Engine, Generator, Sampling
from memconsole_trainer.tasks.answer_scores import Answers, Nearest, most_frequent, scores
from memconsole_trainer.weights.tokenizer_export import ends_of_source

if TYPE_CHECKING:
    from memconsole.plan.templates.template import Question, Template

MOST_ANSWER_TOKENS = 256
"""Most tokens of an answer to a held-out record."""
Recorded = RecordDocuments | StreamRecords

BASELINE_RECORDS = 5_000
"""Train records that the baselines look at."""

SEARCHED_RECORDS = 20_000
"""How many records of a stream are searched for held-out ones."""
ANSWER_LENGTHS = 256
"""Train records whose answers are measured in tokens."""


class Answered(NamedTuple):
    """The model's answer to a record."""

    prompt: str
    text: str
    answers: Answers
    prompt_tokens: int
    room: int
    """Most tokens that the answer can have; below 1 the prompt is too long."""
    filled: bool = False
    """Whether the answer was cut where the model's positions end."""


@dataclass(frozen=True)
class Answerer:
    """Asks a model for the answers of records."""

    template: Template
    tokenizer: Tokenizer
    most_tokens: int
    """Longest answer in tokens."""
    positions: int
    """Most tokens that the model sees."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer, in addition to those of the tokenizer and the template."""

    def answer(
        self,
        engine: Generator,
        record: Record,
        sampling: Sampling = GREEDY,
    ) -> Answered:
        """The model's answers to one record, whose own answers are not needed. What ends an answer is added to the stop
        tokens of `sampling`. Raises `RecordError`."""
        question = self.template.question(record.fields)
        prompt = prompt_ids(self.tokenizer, question)
        room = self._room(prompt)
        if room < 1:
            empty = dict.fromkeys(question.names, "")
            return Answered(str(question.prompt), "", empty, len(prompt), room)
        stops = (*sampling.stop, *self.stops(question))
        new = engine.generate(prompt, room, replace(sampling, stop=stops))
        text = self.tokenizer.continuation(prompt, new, stops)
        if question.prompt.endswith(" "):
            text = text.removeprefix(" ")  # it is in the prompt
        answers = question.parse(text)
        filled = fills_context(new, room, self.most_tokens, stops)
        return Answered(str(question.prompt), text, answers, len(prompt), room, filled)

    def stops(self, question: Question) -> tuple[int, ...]:
        """The tokens that end the last answer to a question."""
        return (*self.tokenizer.stops(question.between[-1]), *self.ends)

    def room(self, record: Record) -> int:
        """Tokens that the answer to a record may have. Raises `RecordError`."""
        return self._room(prompt_ids(self.tokenizer, self.template.question(record.fields)))

    def _room(self, prompt: Sequence[int]) -> int:
        return min(self.most_tokens, self.positions - len(prompt) - 1)


def fills_context(new: Sequence[int], room: int, most: int, stops: Collection[int]) -> bool:
    """Whether a text was cut where the model's positions end: more was wanted, and it did not stop."""
    return len(new) == room < most and new[-1] not in stops


def prompt_ids(tokenizer: Tokenizer, question: Question) -> list[int]:
    """A question's tokens, open at the end."""
    one = encode(tokenizer, [question.prompt], False)[0]
    found = [int(i) for i in ids(one.tokens)[: len(one.offsets)]]
    if tokenizer.joins_spaces and tokenizer.decode(found[-1:]) == " ":
        found.pop()  # in training it is a part of the answer's first token
    return found or tokenizer.prompt("")


@dataclass(frozen=True)
class HeldRecords:
    """Held-out records and the answers that simple baselines give to them."""

    records: Sequence[Record]
    truths: Sequence[Answers]
    baselines: Mapping[str, float] = field(default_factory=dict)


def held_records(
    template: Template, held: Sequence[Record], train: Sequence[Record]
) -> HeldRecords:
    """The held-out records that hold answers, with the baselines' scores. Raises `DataError`."""
    answered = [record for record in held if _answers(template, record)]
    truths = [_answers(template, record) for record in answered]
    known = [record for record in train if _answers(template, record)][:BASELINE_RECORDS]
    if not answered or not known:
        return HeldRecords(answered, truths)
    answers = [_answers(template, record) for record in known]
    frequent = most_frequent(answers)
    index = Nearest([_question(template, record) for record in known])
    nearest = [answers[index.of(_question(template, record))] for record in answered]
    baselines = {
        **_named("frequent_", scores(truths, [frequent] * len(truths))),
        **_named("nearest_", scores(truths, nearest)),
    }
    return HeldRecords(answered, truths, baselines)


@dataclass(frozen=True)
class Asked:
    """The held-out records that are answered at each evaluation."""

    answerer: Answerer
    held: HeldRecords


def asked_records(
    plan: Plan,
    model: Architecture,
    opened: TextSources,
    tokenizer: Tokenizer,
) -> Asked | None:
    """Some held-out records, with the scores of baselines that know some train records; None if the data are no
    records, or none is asked. Both are spread over all records; of a stream, they are the first ones."""
    source, kept = opened.first.source, opened.held[0].source
    if not isinstance(source, Recorded) or not isinstance(kept, Recorded):
        return None
    asked = _held_numbers(kept, opened.held[0].split)[: plan.train.answered_records]
    if not len(asked):
        return None
    held = list(kept.records(np.sort(asked).tolist()))
    train = _trained(source, opened)
    found = held_records(source.template, held, train)
    if not found.records:
        return None
    some = [train[i] for i in spread_order(len(train))[:ANSWER_LENGTHS]]
    most = longest_answer(source.template, tokenizer, [*found.records, *some])
    positions = min(model.max_positions, plan.data.sequence_length)
    ends = ends_of_source(plan, tokenizer)
    return Asked(Answerer(source.template, tokenizer, most, positions, ends), found)


def _trained(source: Recorded, opened: TextSources) -> list[Record]:
    """The train records that baselines know: none that is held out too. Raises `DataError`."""
    found = list(source.records(_train_numbers(source, opened.first.split)))
    hashes = opened.left_out()
    if not hashes:
        return found
    return [one for one in found if text_hash(rendered(source.template, one)) not in hashes]


def _held_numbers(source: Recorded, split: Split) -> NDArray[np.int64]:
    """The numbers of held-out records, spread over all; of a stream, the first ones."""
    if source.count is None:
        return np.flatnonzero(split.held_out(0, _first_ones(source, SEARCHED_RECORDS)))
    return held_out_numbers(source.count, split)


def _train_numbers(source: Recorded, split: Split) -> list[int]:
    """The rising numbers of the train records among `BASELINE_RECORDS` at even distances; of a stream, among the
    first ones."""
    rows = source.count or _first_ones(source, BASELINE_RECORDS)
    numbers = even_rows(rows, BASELINE_RECORDS).tolist()
    return [number for number in numbers if not split.held_out(number, number + 1)[0]]


def _first_ones(stream: Recorded, most: int) -> int:
    """How many of the first records of a stream are looked at: at most `most`."""
    known = stream.expected_count if isinstance(stream, StreamRecords) else stream.count
    return min(most, known or most)


def score_model(
    answerer: Answerer, held: HeldRecords, engine: Engine, tick: Callable[[], None]
) -> tuple[dict[str, float], Answered | None]:
    """The scores of the model and of the baselines on the held-out records, and the model's first answer."""
    answered = []
    for record in held.records:
        answered.append(answerer.answer(engine, record))
        tick()
    if not answered:
        return {}, None
    own = scores(held.truths, [one.answers for one in answered])
    return {**own, **held.baselines}, answered[0]


def longest_answer(template: Template, tokenizer: Tokenizer, records: Sequence[Record]) -> int:
    """Tokens to allow for an answer: a quarter more than the longest of these records has."""
    longest = 0
    for one in encode(tokenizer, [rendered(template, r) for r in records], True):
        longest = max(longest, int((one.tokens >= 0).sum()))
    return min(MOST_ANSWER_TOKENS, longest + longest // 4 + 4)


def _answers(template: Template, record: Record) -> Answers:
    try:
        return template.answers(record.fields)
    except RecordError as error:
        raise DataError(f"{record.where} {error}") from None


def _question(template: Template, record: Record) -> str:
    try:
        return str(template.question(record.fields).prompt)
    except RecordError as error:
        raise DataError(f"{record.where} {error}") from None


def _named(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {prefix + key: value for key, value in values.items()}
