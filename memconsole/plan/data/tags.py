"""Notes on tags of a chat template, such as ``<|im_start|>``, for which a given tokenizer has no token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memconsole.plan import catalog
from memconsole.plan.data.check_records import given_tokenizer
from memconsole.plan.models import tokenizer_config
from memconsole.plan.models.tokenizer_file import tag_tokens
from memconsole.plan.plan import Plan, PlanError, quote
from memconsole.plan.templates.choice import KEY, MODEL, template_of
from memconsole.plan.toggles.optimization import Note
from memconsole.plan.training.origin import FINE_TUNES, FROM_RUN, shortly


def chat_tags(plan: Plan) -> tuple[str, ...]:
    """The tags that the plan's chat template writes, such as ``<|im_start|>``; none for the model's own template, which
    its tokenizer was made for. Raises `PlanError`."""
    template = template_of(plan)
    own = template is None or plan.data.template == MODEL
    return () if own or template is None or not template.chat else template.tags


def tag_notes(plan: Plan) -> tuple[Note, ...]:
    """A note on the tags for which the run's tokenizer has no token, according to its files; empty if there are none. A
    tokenizer that the run trains has a token for each tag. Raises `PlanError`."""
    given, tags = given_tokenizer(plan), chat_tags(plan)
    known = tag_tokens(given.path) if given is not None and tags else None
    if known is None:
        return ()
    cut = [tag for tag in tags if tag not in known]
    return (Note(KEY, cut_words(plan, cut)),) if cut else ()


def cut_words(plan: Plan, tags: Sequence[str]) -> str:
    """One sentence on tags that the run's tokenizer splits: what that means, and what to set instead."""
    given = given_tokenizer(plan)
    tokenizer = given.words if given is not None else "the run's tokenizer"
    listed = " and ".join(filter(None, [", ".join(tags[:-1]), tags[-1]]))
    are, each = ("are no tokens", "each") if len(tags) > 1 else ("is no token", "it")
    pretrained = shortly(plan) in (FINE_TUNES, FROM_RUN)
    means = ", which the trained weights have not seen as a tag" if pretrained else ""
    return (
        f"{KEY} = {quote(plan.data.template)}: {listed} {are} of {tokenizer}; {each} is split into several ordinary "
        f"tokens{means}; {_instead(plan)}"
    )


def _instead(plan: Plan) -> str:
    directory = catalog.model_directory(plan)
    try:
        own = tokenizer_config.read(Path(directory)).template if directory is not None else None
    except PlanError:
        own = None
    if own:
        return f"{KEY} = {MODEL} writes chats as this model knows them"
    return f"{KEY} = plain writes chats without tags"
