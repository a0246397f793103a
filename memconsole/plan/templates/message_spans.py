"""Locates messages in a chat that a template has written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from memconsole.plan.models.tokenizer_file import TAG
from memconsole.plan.templates.chat import Message, RecordError
from memconsole.plan.templates.rendered import SLOT, Span


class Write(Protocol):
    """Writes messages; with `prompt` also what opens the assistant's next message. Raises `RecordError`."""

    def __call__(self, messages: Sequence[Message], prompt: bool = False) -> str: ...


def message_spans(
    messages: Sequence[Message], numbers: Iterable[int], write: Write, text: str
) -> Iterator[Span]:
    """Where each message of these rising numbers starts and ends in `text`, which `write` made of all messages.

    A message is what it adds to the chat before it. A message of the assistant starts where its prompt ends. Raises
    `RecordError`.
    """
    earliest_start = 0
    for number in numbers:
        of_assistant = messages[number]["role"] == "assistant"
        try:
            before = write(messages[:number], prompt=of_assistant) if number else ""
            through = write(messages[: number + 1])
            if through.startswith(before) and text.startswith(through):
                span = len(before), len(through)
            else:
                span = _span_by_slots(messages, number, write, text, before, earliest_start)
        except RecordError:
            raise RecordError(
                f"its template does not write messages[{number}] in one piece"
            ) from None
        yield span
        earliest_start = span[1]


def _span_by_slots(
    messages: Sequence[Message],
    number: int,
    write: Write,
    text: str,
    before: str,
    earliest_start: int,
) -> Span:
    """The span of a message that the template writes otherwise while it is the last one, for example with its reasoning,
    or with a token that ends the chat.

    A second rendering of the whole chat has slots instead of the message's content and calls of tools: where it differs
    from `text` is the message. The message ends with the text that follows its last slot while it is the last message,
    such as an end-of-turn token. `before` is the chat up to the message, with the text that opens the message. Raises
    `RecordError`.
    """
    with_slots = [*messages[:number], _with_slots(messages[number]), *messages[number + 1 :]]
    whole, through = write(with_slots), write(with_slots[: number + 1])
    closed = write(messages[:number]) if number else ""
    if (
        SLOT not in whole
        or SLOT not in through
        or whole.count(SLOT) > _slot_count(with_slots[number])
    ):
        raise RecordError("has no slot, or one twice")
    start = _common_prefix(text, whole)
    stop = max(start, len(text) - _common_prefix(text[::-1], whole[::-1]))
    if text.startswith(before):
        start = len(before)
    elif opening := before[_common_prefix(before, closed) :]:
        at = text.rfind(opening, earliest_start, start)
        start = start if at < 0 else at + len(opening)
    if start < earliest_start:
        raise RecordError("overlaps the message before it")
    ending = through[through.rindex(SLOT) + 1 :]
    return start, stop + _common_prefix_of_whole_tags(ending, text[stop:])


def _with_slots(value: Any) -> Any:
    """A message, or a part of it, with a slot for each text of its content and of its calls."""
    if isinstance(value, str):
        return SLOT
    if isinstance(value, Mapping):
        kept = {"role", "type", "id"}
        if "role" in value:
            kept = set(value) - {"content", "tool_calls"}
        return {k: v if k in kept else _with_slots(v) for k, v in value.items()}
    return [_with_slots(v) for v in value] if isinstance(value, list) else value


def _slot_count(value: Any) -> int:
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(_slot_count, value)) if isinstance(value, list) else int(value == SLOT)


def _common_prefix(one: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    unequal = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unequal, min(len(one), len(other)))


def _common_prefix_of_whole_tags(ending: str, text: str) -> int:
    """The number of characters of `ending` with which `text` begins, without a part of a tag."""
    count = _common_prefix(ending, text)
    cut_tags = (m.start() for m in TAG.finditer(ending) if m.start() < count < m.end())
    return next(cut_tags, count)
