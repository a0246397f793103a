"""A template: writes a record or a chat as text, and distinguishes its answers from its questions.

Templates are Jinja, rendered in a sandbox with the settings of Hugging Face's chat templates.
`{% generation %}` and `{% endgeneration %}` enclose what is to be answered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import TemplateSyntaxError

from memconsole.plan.models.tokenizer_file import END_OF_TEXT
from memconsole.plan.templates import calls
from memconsole.plan.templates.chat import (
    CALLS,
    CHAT_ANSWER,
    CHAT_COLUMNS,
    DEVELOPER,
    PARTS,
    REASONING,
    Message,
    RecordError,
    is_learned,
    messages_of,
    options_of,
    tools_of,
)
from memconsole.plan.templates.environment import as_text, template_environment
from memconsole.plan.templates.question import Question, numbered_slot
from memconsole.plan.templates.rendered import ANSWER_START, CUT, MARKS, Rendered, Span, from_marked
from memconsole.plan.templates.template_names import template_names
from memconsole.plan.templates.written_chat import WrittenChat

__all__ = ["Question", "Template", "TemplateSyntaxError"]


class Template:
    """Writes records."""

    unlocated = "use data.loss_on = all, or a template with {% generation %}"
    """What to do if the answers of a chat cannot be located."""

    def __init__(
        self,
        source: str,
        guarded: Iterable[str] | None = None,
        variables: Mapping[str, str] | None = None,
        learns_answers: bool = True,
        of_model: bool = False,
    ) -> None:
        """`guarded` are the control tokens of a given tokenizer, which the text of a record cannot produce; None stands
        for those of a tokenizer that the run trains: the end-of-text token and the template's tags. `variables` such as
        `bos_token` are known to the template. If only answers are learned (`learns_answers`), a chat whose answers
        cannot be located is refused. A template `of_model` writes as in transformers: nothing for what is missing, and
        lists and objects as Python shows them. Raises `TemplateSyntaxError`."""
        self._learns_answers, self._of_model = learns_answers, of_model
        environment = template_environment(of_model)
        self._allowance = environment.allowance
        self._variables = dict(variables or {})
        known = {*self._variables, *environment.globals, "add_generation_prompt"}
        self._names = template_names(environment, source, known)
        self._template = environment.from_string(source)
        self.chat = self._names.writes_chats
        """Whether it writes chats; otherwise it writes records by the names of their fields."""
        self.fields = self._names.fields
        """Fields of a record, in the order of the template; empty if it writes chats."""
        self.answer_fields = self._names.answer_fields
        """Fields of a record that are answered, in the order of the template."""
        self.tags = self._names.tags
        """Words like `<cause>` that the template writes: control tokens of a trained tokenizer."""
        tokens = {END_OF_TEXT, *self.tags} if guarded is None else {*guarded}
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        known_values = tuple(sorted(self._variables.items()))
        self.identity: tuple[object, ...] = (source, tuple(longest_first), known_values, of_model)
        """Two templates of the same identity write the same."""
        self._guarded = re.compile("|".join(map(re.escape, longest_first))) if tokens else None

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields of a record that it may read."""
        return self.fields or CHAT_COLUMNS

    @property
    def marks_answers(self) -> bool:
        """Whether it says what is answered. A chat template need not: answers are the assistant's
        messages."""
        return self.chat or self._names.has_answer_blocks

    def render(self, record: Mapping[str, Any]) -> Rendered:
        """The record as text. Raises `RecordError`."""
        if not self.chat:
            return from_marked(self._render(self._fields(record)))
        chat = WrittenChat(self._render, *self._chat(record), self._names.mentioned)
        unwritten = chat.unwritten_parts()
        if CALLS in unwritten:
            raise RecordError(
                f"has calls of tools ({', '.join(PARTS[CALLS])}), which the template does not write; use "
                f"{'' if self._of_model else 'data.template = model, or '}a template that writes them"
            )
        text = from_marked(chat.text)
        only_read = chat.unlearned_spans(of_assistant_only=self._learns_answers)
        answers = text.answers if self._names.has_answer_blocks else self._answer_spans(chat)
        return Rendered(
            text,
            tuple(a for a in answers if not any(_overlap(a, span) for span in only_read)),
            text.cuts,
            only_read,
            unwritten,
            *chat.unwritten_and_unknown_roles(),
        )

    def _answer_spans(self, chat: WrittenChat) -> tuple[Span, ...]:
        """Where the assistant's messages are; empty if they are not needed and cannot be located."""
        try:
            return chat.assistant_spans()
        except RecordError as error:
            if self._learns_answers:
                raise RecordError(
                    f"{error}, so that its answer cannot be located; {self.unlocated}"
                ) from None
            return ()

    def question(self, record: Mapping[str, Any]) -> Question:
        """What comes before the answers of `record`, which need not be there. Raises
        `RecordError`."""
        if not self.chat:
            slots = {name: numbered_slot(i) for i, name in enumerate(self.answer_fields)}
            text = self._render({**self._fields(record), **slots})
            return Question.of_open(text.partition(ANSWER_START)[0], text, self.answer_fields)
        messages, variables = self._chat(record)
        if messages[-1]["role"] == "assistant":
            messages.pop()
        answered = [*messages, {"role": "assistant", "content": numbered_slot(0)}]
        text = self._render({**variables, "messages": answered})
        before = self._render({**variables, "messages": messages}, prompt=True)
        if self._names.has_answer_blocks:
            opened = text[: text.rindex(ANSWER_START)] if ANSWER_START in text else text
            # Some templates mark the beginning of a message as learned, which is given, not answered.
            given = from_marked(before)
            longer = len(given) > len(from_marked(opened)) and from_marked(text).startswith(given)
            before = before if longer else opened
        return Question.of_open(before, text, (CHAT_ANSWER,))

    def answers(self, record: Mapping[str, Any]) -> dict[str, str]:
        """The answers that `record` holds, by name; empty if it holds none, one that is not learned, or one that calls tools
        or reasons, of which its content is a part. Raises `RecordError`."""
        if not self.chat:
            values = {name: record.get(name) for name in self.answer_fields}
            return {name: str(as_text(v)) for name, v in values.items() if v is not None}
        last = messages_of(record)[-1]
        learned = last["role"] == "assistant" and is_learned(last)
        learned &= not any(last.get(key) for part in (CALLS, REASONING) for key in PARTS[part])
        return {CHAT_ANSWER: last["content"]} if learned else {}

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """Fields without which a record cannot be written."""
        return tuple(name for name in self.fields if not self._writes_without(name))

    def _writes_without(self, name: str) -> bool:
        try:
            self._render({other: "x" for other in self.fields if other != name})
        except RecordError:
            return False
        return True

    def _fields(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a record. Writing one that is null is an error that says so."""
        undefined = self._template.environment.undefined
        error: Any = RecordError  # jinja2 raises it, but declares an error of its own
        null = (name for name, value in record.items() if value is None)
        null_fields = {name: undefined(f'field "{name}" is null', exc=error) for name in null}
        return {**null_fields, **self._cleaned(record)}

    def _chat(self, record: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """The messages, and the other variables that a chat template may ask for."""
        tools = self._cleaned(tools_of(record))
        messages = messages_of(record)
        if any("tool_calls" in message for message in messages) and self._takes_objects:
            messages = [calls.with_objects(message) for message in messages]
        messages = self._cleaned(messages)
        for message in messages:
            if message["role"] == DEVELOPER and DEVELOPER not in self._names.mentioned:
                message["role"] = "system"
        options = self._cleaned(options_of(record))
        return messages, {**options, "documents": None, "tools": tools}

    @cached_property
    def _takes_objects(self) -> bool:
        return calls.takes_objects(
            lambda messages: self._render({"tools": None, "messages": messages})
        )

    def _render(self, values: Mapping[str, Any], prompt: bool = False) -> str:
        try:
            with self._allowance:
                return self._template.render(
                    **{**self._variables, **values, "add_generation_prompt": prompt}
                )
        except jinja2.UndefinedError as error:
            missing = re.match(r"'([^']+)' is undefined", str(error))
            if missing:
                raise RecordError(f'has no field "{missing[1]}"') from None
            raise RecordError(f"does not fit the template: {error}") from None
        except RecordError:
            raise
        except RecursionError:
            raise RecordError("does not fit the template: it calls itself without end") from None
        except MemoryError:
            raise RecordError("does not fit the template: it needs too much memory") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RecordError(f"does not fit the template: {error}") from None

    def _cleaned(self, value: Any) -> Any:
        """`value` without marks and None, and with its control tokens cut in two."""
        if isinstance(value, str):
            value = value if value.isascii() else MARKS.sub("\ufffd", value)
            if self._guarded is not None:
                value = self._guarded.sub(lambda m: f"{m[0][0]}{CUT}{m[0][1:]}", value)
            return value
        if isinstance(value, Mapping):
            return {str(k): self._cleaned(v) for k, v in value.items() if v is not None}
        if isinstance(value, list | tuple):
            return [self._cleaned(v) for v in value]
        return value


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]
