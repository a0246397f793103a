"""Added tokens of a given tokenizer whose ids are beyond the model's vocabulary, as in Gemma 3 1B. Training leaves them
out; a plan that needs one of them is refused."""

from __future__ import annotations

from memconsole.plan.data.check_records import given_tokenizer
from memconsole.plan.models import tokenizer_file
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, PlanError, quote
from memconsole.plan.templates.choice import template_of
from memconsole.plan.toggles.optimization import Note


def check_given_tokenizer(plan: Plan, vocab_size: int) -> None:
    """Raise `PlanError` if the given tokenizer has a larger vocabulary than the model, or if a token that begins or ends
    a text, or that the template writes, is beyond the model's vocabulary."""
    given = given_tokenizer(plan)
    if given is None:
        return
    entries, key = tokenizer_file.vocabulary_size(given.path), _key(plan)
    if entries > vocab_size:
        raise PlanError(
            f"{key} = {quote(given.path)}: {given.words} has {entries:,} entries, the model only {vocab_size:,}",
            key,
        )
    beyond = tokenizer_file.tokens_beyond(given.path, vocab_size)
    template = template_of(plan) if beyond else None
    tags = template.tags if template is not None else ()
    around = tokenizer_file.around_tokens(given.path) if beyond else ()
    needed = next((token for token in beyond if token in (*around, *tags)), None)
    if needed is not None:
        why = "begins or ends each text" if needed in around else "is written by the template"
        raise PlanError(
            f"{key} = {quote(given.path)}: {quote(needed)} {why}, but its id is not below the model's "
            f"vocabulary of {vocab_size:,}; resize the model's embedding, or use another tokenizer",
            key,
        )


def added_notes(plan: Plan, model: Model) -> tuple[Note, ...]:
    """A note on the added tokens that training leaves out; empty if there are none."""
    given, key = given_tokenizer(plan), _key(plan)
    if given is None or not isinstance(model, Architecture):
        return ()
    beyond = tokenizer_file.tokens_beyond(given.path, model.vocab_size)
    if not beyond:
        return ()
    words = left_out_words(beyond, model.vocab_size)
    return (Note(key, f"{key} = {quote(given.path)}: {words}"),)


def left_out_words(beyond: tuple[str, ...], vocab_size: int) -> str:
    """One clause on the tokens that are left out."""
    more = f" and {len(beyond) - 1:,} more" if len(beyond) > 1 else ""
    return (
        f"the added token {quote(beyond[0])}{more} of the tokenizer is beyond the model's vocabulary of {vocab_size:,} "
        "and is left out: in a text its name is ordinary text"
    )


def _key(plan: Plan) -> str:
    return "model.name" if plan.data.tokenizer is None else "data.tokenizer"
