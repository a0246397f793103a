"""Preferences: records with a chosen and a rejected answer to the same prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from memconsole.plan.templates.chat import (
    CHOSEN,
    PREFERENCE,
    REJECTED,
    Message,
    RecordError,
    message_list,
)
from memconsole.plan.templates.rendered import Rendered
from memconsole.plan.templates.template import Question, Template

_REPLACED = (*PREFERENCE, "messages", "conversations", "completion")
"""Fields of a record that `answered` writes anew, or leaves out: data of preferences often repeat the chat in them."""


class Pair(Rendered):
    """Both answers of a record, each rendered with the prompt. As a text it is one after the other."""

    chosen: Rendered
    rejected: Rendered

    @classmethod
    def of(cls, chosen: Rendered, rejected: Rendered) -> Self:
        """The pair of these texts. Places and what the template does not write are those of the chosen one."""
        made = cls(
            chosen + rejected,
            chosen.answers,
            chosen.cuts,
            chosen.only_read,
            chosen.unwritten,
            chosen.unwritten_roles,
            chosen.unknown_roles,
        )
        made.chosen, made.rejected = chosen, rejected
        return made


class PairTemplate(Template):
    """Writes records with preferences: as the template writes a record, once with each answer. A question has the chosen
    answer."""

    unlocated = "use a template with {% generation %}"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.identity = (*self.identity, PREFERENCE)

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields of a record that it may read."""
        return (*super().columns, *PREFERENCE)

    def render(self, record: Mapping[str, Any]) -> Pair:
        """Both answers as texts. Raises `RecordError`."""
        chosen, rejected = (
            super(PairTemplate, self).render(answered(record, field))
            for field in (CHOSEN, REJECTED)
        )
        return Pair.of(_without_common(chosen, rejected), _without_common(rejected, chosen))

    def question(self, record: Mapping[str, Any]) -> Question:
        """What comes before the answer of `record`, which may be a prompt without answers. Raises `RecordError`."""
        return super().question(_with_chosen(record))

    def answers(self, record: Mapping[str, Any]) -> dict[str, str]:
        """The chosen answer by name; empty if there is none. Raises `RecordError`."""
        return super().answers(_with_chosen(record))


def _without_common(text: Rendered, other: Rendered) -> Rendered:
    """`text` without the spans of the answers up to which it equals `other`: they are part of the prompt. The last answer
    is kept, since one answer may begin with the other."""
    answers = [span for span in text.answers[:-1] if text[: span[1]] != other[: span[1]]]
    return Rendered(
        text,
        (*answers, *text.answers[-1:]),
        text.cuts,
        text.only_read,
        text.unwritten,
        text.unwritten_roles,
        text.unknown_roles,
    )


def _with_chosen(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return answered(record, CHOSEN) if CHOSEN in record else record


def answered(record: Mapping[str, Any], field: str) -> dict[str, Any]:
    """`record` with the answer in `field` alone, in a layout of other records: `prompt` and `completion`, or `messages` if
    the answer is a whole chat. Raises `RecordError`."""
    listed = ", ".join(map(str, record)) or "no fields"
    for name in (CHOSEN, REJECTED):
        if record.get(name) is None:
            what = "is null" if name in record else f"is missing: the record has {listed}"
            raise RecordError(
                f'field "{name}" {what}; preferences are learned from {", ".join(PREFERENCE)}'
            )
    rest = {name: value for name, value in record.items() if name not in _REPLACED}
    prompt, answer = record.get("prompt"), record[field]
    is_text = isinstance(answer, str) and not _is_list(answer)
    messages = [] if is_text else message_list(answer, field)
    if prompt is None and all(message["role"] == "assistant" for message in messages):
        raise RecordError(
            f'field "prompt" is missing, and "{field}" is no chat that holds it: the record has {listed}'
        )
    if is_text:
        prompt_is_text = isinstance(prompt, str) and not _is_list(prompt)
        asked = prompt if prompt_is_text else _prompt_messages(prompt)
        return {**rest, "prompt": asked, "completion": answer}
    if messages[-1]["role"] != "assistant":
        raise RecordError(f'field "{field}" does not end with a message of the assistant')
    if messages[0]["role"] == "assistant" and prompt is not None:
        return {**rest, "messages": [*_prompt_messages(prompt), *messages]}
    return {**rest, "messages": messages}


def _prompt_messages(prompt: Any) -> list[Message]:
    """The messages of a prompt, which may be the text of one. Raises `RecordError`."""
    if isinstance(prompt, str) and not _is_list(prompt):
        return [{"role": "user", "content": prompt}]
    return message_list(prompt, "prompt")


def _is_list(text: str) -> bool:
    """Whether a text is the JSON of a list of messages, as tables often hold it."""
    return text.startswith("[{") and text.rstrip().endswith("}]")
