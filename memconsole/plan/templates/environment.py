"""The Jinja environment of templates: `{% generation %}`, fields that a record lacks, and functions to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension

from memconsole.plan.templates.chat import RecordError
from memconsole.plan.templates.rendered import ANSWER_END, ANSWER_START
from memconsole.plan.templates.sandbox import Sandbox

CLOCK = datetime(2024, 7, 26)
"""The time that `strftime_now` tells to every template: the date that Llama 3 writes where no clock is known. With the
real date the same records would give other texts each day: tokens on disk would be made again, a run that is resumed on
another day would find its data changed, and a prompt would have another date than the chats that were learned."""


def template_environment(of_model: bool) -> Sandbox:
    """An environment with the settings of Hugging Face's chat templates.

    A template `of_model` writes as in transformers: nothing for what is missing, and lists and objects as Python shows
    them.
    """
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.Undefined if of_model else _MissingField,
        extensions=[_AnswerBlocks, "jinja2.ext.loopcontrols"],
        finalize=None if of_model else as_text,
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = CLOCK.strftime
    return environment


class _AnswerBlocks(Extension):
    """`{% generation %}`: marks where an answer begins and ends."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's name)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{ANSWER_START}{caller()}{ANSWER_END}"


def is_answer_block(block: nodes.CallBlock) -> bool:
    """Whether a block of a parsed template is a `{% generation %}`."""
    method = getattr(block.call, "node", None)
    return isinstance(method, nodes.ExtensionAttribute) and method.name == "_marked"


class _MissingField(jinja2.StrictUndefined):
    """A field that a record lacks: a condition may ask for it, and writing it is an error."""

    def __bool__(self) -> bool:  # type: ignore[override]  # the base declares that it never returns
        return False


def as_text(value: Any) -> Any:
    """How a value is written: a list by its values. Raises `RecordError` for an object."""
    if isinstance(value, list | tuple):
        return ", ".join(str(as_text(element)) for element in value)
    if isinstance(value, Mapping):
        raise RecordError("has an object where the template writes text")
    return value


def _raise_exception(message: str) -> None:
    """A template calls it for a chat that it does not write."""
    raise RecordError(f"is refused by the template: {message}")
