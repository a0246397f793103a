"""A template: writes a record or a chat as text, and distinguishes its answers from its questions.

Templates are Jinja, rendered in a sandbox with the settings of Hugging Face's chat templates.
`{% generation %}` and `{% endgeneration %}` enclose what is to be answered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension

from memconsole.plan.models.tokenizer_file import END_OF_TEXT, TAG
from memconsole.plan.templates import calls
from memconsole.plan.templates.chat import (
    CALLS,
    CHAT_ANSWER,
    CHAT_COLUMNS,
    DEVELOPER,
    LEARNED,
    PARTS,
    TOOLS,
    Message,
    RecordError,
    is_learned,
    messages_of,
    options_of,
    tools_of,
)
from memconsole.plan.templates.rendered import (
    ANSWER,
    ANSWERED,
    CUT,
    MARKS,
    SLOT,
    Rendered,
    of_marked,
)
from memconsole.plan.templates.roles import unwritten_and_unknown
from memconsole.plan.templates.sandbox import Sandbox
from memconsole.plan.templates.turns import turns

__all__ = ["Question", "Template", "TemplateSyntaxError"]

CLOCK = datetime(2024, 7, 26)
"""The time that `strftime_now` tells to every template: the date that Llama 3 writes where no clock is known. With the
real date the same records would give other texts each day: tokens on disk would be made again, a run that is resumed on
another day would find its data changed, and a prompt would have another date than the chats that were learned."""
_SLOTS = re.compile(f"{SLOT}([0-9]+){SLOT}")
"""The number of an answer between two slots, in a rendering that leaves the answers open."""


Place = tuple[int, int]
"""Start and end in a text, in characters."""


class _Answers(Extension):
    """`{% generation %}`: marks where an answer begins and ends."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's name)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{ANSWER}{caller()}{ANSWERED}"


class _Missing(jinja2.StrictUndefined):
    """A field that a record lacks: a condition may ask for it, and writing it is an error."""

    def __bool__(self) -> bool:  # type: ignore[override]  # the base declares that it never returns
        return False


class Question(NamedTuple):
    """A rendering up to its answer, and how its answers are separated."""

    prompt: Rendered
    names: tuple[str, ...]
    """The answers, in the order in which they are written."""
    between: tuple[str, ...]
    """The text before, between and after them: one more than there are answers."""

    def parse(self, generated: str) -> dict[str, str]:
        """The answers in a generated text, by name. An answer that is not there is empty."""
        found = dict.fromkeys(self.names, "")
        first, *ends = (words.strip().lower() for words in self.between)
        rest = generated.lstrip()
        if first and rest.lower().startswith(first):
            rest = rest[len(first) :]
        for name, end in zip(self.names, ends, strict=True):
            at = rest.lower().find(end) if end else -1
            value, rest = (rest, "") if at < 0 else (rest[:at], rest[at + len(end) :])
            found[name] = value.strip()
        return found


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
        environment = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.Undefined if of_model else _Missing,
            extensions=[_Answers, "jinja2.ext.loopcontrols"],
            finalize=None if of_model else _written,
        )
        self._allowance = environment.allowance
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = CLOCK.strftime
        self._variables = dict(variables or {})
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        known = {*self._variables, *environment.globals, "add_generation_prompt"}
        names = meta.find_undeclared_variables(tree) - known
        self.chat = "messages" in names
        """Whether it writes chats; otherwise it writes records by the names of their fields."""
        order = [n.name for n in tree.find_all(nodes.Name) if n.ctx == "load" and n.name in names]
        self.fields: tuple[str, ...] = () if self.chat else tuple(dict.fromkeys(order))
        self._blocks = [n for n in tree.find_all(nodes.CallBlock) if _is_answer(n)]
        inside = [n.name for block in self._blocks for n in block.find_all(nodes.Name)]
        self.answer_fields = tuple(name for name in self.fields if name in inside)
        """Fields of a record that are answered, in the order of the template."""
        attributes = {n.attr for n in tree.find_all(nodes.Getattr)}
        constants = [n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)]
        self._mentioned = {*names, *attributes, *constants}
        """Fields that the template asks for, among other words."""
        literals = [n.data for n in tree.find_all(nodes.TemplateData)]
        literals += constants
        self.tags = tuple(dict.fromkeys(tag for text in literals for tag in TAG.findall(text)))
        """Words like `<cause>` that the template writes: control tokens of a trained tokenizer."""
        made = (END_OF_TEXT, *self.tags)
        guards = sorted({*(made if guarded is None else guarded)}, key=lambda t: (-len(t), t))
        known_values = tuple(sorted(self._variables.items()))
        self.identity: tuple[object, ...] = (source, tuple(guards), known_values, of_model)
        """Two templates of the same identity write the same."""
        self._guarded = re.compile("|".join(map(re.escape, guards))) if guards else None

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields of a record that it may read."""
        return self.fields or CHAT_COLUMNS

    @property
    def marks_answers(self) -> bool:
        """Whether it says what is answered. A chat template need not: answers are the assistant's
        messages."""
        return self.chat or bool(self._blocks)

    def render(self, record: Mapping[str, Any]) -> Rendered:
        """The record as text. Raises `RecordError`."""
        if not self.chat:
            return of_marked(self._render(self._fields(record)))
        messages, others = self._chat(record)
        text = self._render({**others, "messages": messages})
        unwritten = self._unwritten(messages, others, text)
        if CALLS in unwritten:
            raise RecordError(
                f"has calls of tools ({', '.join(PARTS[CALLS])}), which the template does not write; use "
                f"{'' if self._of_model else 'data.template = model, or '}a template that writes them"
            )
        found = of_marked(text)
        only_read = self._only_read(messages, others, text)
        answers = found.answers if self._blocks else self._answers(messages, others, text)
        learned = (a for a in answers if not any(_overlap(a, place) for place in only_read))
        roles = unwritten_and_unknown(
            messages,
            self._mentioned,
            lambda said: self._render({**others, "messages": said}) == text,
        )
        return Rendered(found, tuple(learned), found.cuts, only_read, unwritten, *roles)

    def question(self, record: Mapping[str, Any]) -> Question:
        """What comes before the answers of `record`, which need not be there. Raises
        `RecordError`."""
        if not self.chat:
            slots = {name: f"{SLOT}{i}{SLOT}" for i, name in enumerate(self.answer_fields)}
            text = self._render({**self._fields(record), **slots})
            return self._open(text.partition(ANSWER)[0], text, self.answer_fields)
        messages, others = self._chat(record)
        if messages[-1]["role"] == "assistant":
            messages.pop()
        answered = [*messages, {"role": "assistant", "content": f"{SLOT}0{SLOT}"}]
        text = self._render({**others, "messages": answered})
        before = self._render({**others, "messages": messages}, prompt=True)
        if self._blocks:
            before = text[: text.rindex(ANSWER)] if ANSWER in text else text
        return self._open(before, text, (CHAT_ANSWER,))

    def answers(self, record: Mapping[str, Any]) -> dict[str, str]:
        """The answers that `record` holds, by name; empty if it holds none, or one that is not learned. Raises
        `RecordError`."""
        if not self.chat:
            found = {n: record[n] for n in self.answer_fields if record.get(n) is not None}
            return {name: str(_written(value)) for name, value in found.items()}
        last = messages_of(record)[-1]
        learned = last["role"] == "assistant" and is_learned(last)
        return {CHAT_ANSWER: last["content"]} if learned else {}

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """Fields without which a record cannot be written."""
        return tuple(n for n in self.fields if not self._writes_without(n))

    def _writes_without(self, name: str) -> bool:
        try:
            self._render({n: "x" for n in self.fields if n != name})
        except RecordError:
            return False
        return True

    def _open(self, before: str, text: str, names: tuple[str, ...]) -> Question:
        prompt = of_marked(before)
        rest = str(of_marked(_SLOTS.sub(lambda m: f"\0{m[1]}\0", text)))
        rest = rest[len(prompt) :] if rest.startswith(prompt) else rest
        parts = rest.split("\0")
        order = tuple(names[int(number)] for number in parts[1::2])
        return Question(prompt, order, tuple(parts[0::2]))

    def _fields(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a record. Writing one that is null is an error that says so."""
        undefined = self._template.environment.undefined
        error: Any = RecordError  # jinja2 raises it, but declares an error of its own
        null = (name for name, value in record.items() if value is None)
        named = {n: undefined(f'field "{n}" is null', exc=error) for n in null}
        return {**named, **self._cleaned(record)}

    def _chat(self, record: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """The messages, and what else a chat template may ask for."""
        given = {"documents": None, "tools": self._cleaned(tools_of(record))}
        messages = messages_of(record)
        if any("tool_calls" in one for one in messages) and self._takes_objects:
            messages = [calls.with_objects(one) for one in messages]
        messages = self._cleaned(messages)
        for message in messages:
            if message["role"] == DEVELOPER and DEVELOPER not in self._mentioned:
                message["role"] = "system"
        return messages, {**self._cleaned(options_of(record)), **given}

    @cached_property
    def _takes_objects(self) -> bool:
        return calls.takes_objects(lambda said: self._render({"tools": None, "messages": said}))

    def _unwritten(
        self, messages: list[Message], others: Mapping[str, Any], text: str
    ) -> tuple[str, ...]:
        """The parts of the chat that the template neither asks for nor writes along with others."""
        given = {TOOLS: others[TOOLS]}
        held = {name for one in (given, *messages) for name, value in one.items() if value}
        found = []
        for part, fields in PARTS.items():
            if held.isdisjoint(fields) or not self._mentioned.isdisjoint(held.intersection(fields)):
                continue
            rest, *said = (
                {k: v for k, v in one.items() if k not in fields} for one in (others, *messages)
            )
            if self._render({**rest, "messages": said}) == text:
                found.append(part)
        return tuple(found)

    def _answers(
        self, messages: list[Message], others: Mapping[str, Any], text: str
    ) -> tuple[Place, ...]:
        """Places of the assistant's messages; none if they are not needed and cannot be located."""
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            return self._places(messages, numbers, others, text)
        except RecordError as error:
            if self._learns_answers:
                raise RecordError(
                    f"{error}, so that its answer cannot be located; {self.unlocated}"
                ) from None
            return ()

    def _only_read(
        self, messages: list[Message], others: Mapping[str, Any], text: str
    ) -> tuple[Place, ...]:
        """Places of the messages that are never learned. If only answers are learned, those of the assistant are enough.
        Raises `RecordError`."""
        numbers = [
            number
            for number, message in enumerate(messages)
            if not is_learned(message)
            and (message["role"] == "assistant" or not self._learns_answers)
        ]
        try:
            return self._places(messages, numbers, others, text)
        except RecordError as error:
            raise RecordError(
                f"{error}, so that it cannot be left out of the loss; use another data.template, or remove its "
                f"{', '.join(LEARNED)}"
            ) from None

    def _places(
        self,
        messages: list[Message],
        numbers: Sequence[int],
        others: Mapping[str, Any],
        text: str,
    ) -> tuple[Place, ...]:
        """Places of the messages of these numbers in the text without its marks, if they have text. Raises `RecordError`."""

        def write(messages: Sequence[Message], prompt: bool = False) -> str:
            return self._render({**others, "messages": messages}, prompt)

        def place(at: int) -> int:
            return len(MARKS.sub("", text[:at]))

        found = [(place(a), place(b)) for a, b in turns(messages, numbers, write, text)]
        return tuple((start, end) for start, end in found if start < end)

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


def _overlap(one: Place, other: Place) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _is_answer(block: nodes.CallBlock) -> bool:
    method = getattr(block.call, "node", None)
    return isinstance(method, nodes.ExtensionAttribute) and method.name == "_marked"


def _written(value: Any) -> Any:
    """How a value is written: a list by its values. Raises `RecordError` for an object."""
    if isinstance(value, list | tuple):
        return ", ".join(str(_written(one)) for one in value)
    if isinstance(value, Mapping):
        raise RecordError("has an object where the template writes text")
    return value


def _refuse(message: str) -> None:
    raise RecordError(f"is refused by the template: {message}")
