"""Locates messages in a chat that a template has written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from memconsole.plan.models.tokenizer_file import TAG
from memconsole.plan.templates.chat import Message, RecordError
from memconsole.plan.templates.rendered import SLOT


class Write(Protocol):
    """Writes messages; with `prompt` also what opens the assistant's next message. Raises `RecordError`."""

    def __call__(self, messages: Sequence[Message], prompt: bool = False) -> str: ...


def turns(
    messages: Sequence[Message], numbers: Iterable[int], write: Write, text: str
) -> Iterator[tuple[int, int]]:
    """Where each message of these rising numbers starts and ends in `text`, which `write` made of all messages: it is
    what the message adds to the chat before it. A message of the assistant starts where its prompt ends. Raises
    `RecordError`."""
    least = 0
    for number in numbers:
        asked = messages[number]["role"] == "assistant"
        try:
            before = write(messages[:number], prompt=asked) if number else ""
            until = write(messages[: number + 1])
            if until.startswith(before) and text.startswith(until):
                found = len(before), len(until)
            else:
                found = _between_slots(messages, number, write, text, before, least)
        except RecordError:
            raise RecordError(
                f"its template does not write messages[{number}] in one piece"
            ) from None
        yield found
        least = found[1]


def _between_slots(
    messages: Sequence[Message], number: int, write: Write, text: str, before: str, least: int
) -> tuple[int, int]:
    """`turns` of a message that the template writes otherwise while it is the last one, for example with its reasoning,
    or with a token that ends the chat. The chat `before` it ends with what opens the message. It starts after the first
    `least` characters.

    A second rendering has slots instead of the message's content and calls of tools: what differs is the message. It
    ends with the text that follows its last slot, such as an end-of-turn token, while it is the last message.
    """
    opened = [*messages[:number], _slotted(messages[number]), *messages[number + 1 :]]
    whole, last = write(opened), write(opened[: number + 1])
    closed = write(messages[:number]) if number else ""
    start = _common(text, whole)
    stop = max(start, len(text) - _common(text[::-1], whole[::-1]))
    if SLOT not in whole or SLOT not in last or whole.count(SLOT) > _slots(opened[number]):
        raise RecordError("has no slot, or one twice")
    if text.startswith(before):
        start = len(before)
    elif opening := before[_common(before, closed) :]:
        at = text.rfind(opening, least, start)
        start = start if at < 0 else at + len(opening)
    if start < least:
        raise RecordError("overlaps the message before it")
    return start, stop + _same(last[last.rindex(SLOT) + 1 :], text[stop:])


def _slotted(value: Any) -> Any:
    """A message, or a part of it, with a slot for the text of its content and of its calls."""
    if isinstance(value, str):
        return SLOT
    if isinstance(value, Mapping):
        kept = {"role", "type", "id"}
        if "role" in value:
            kept = set(value) - {"content", "tool_calls"}
        return {k: v if k in kept else _slotted(v) for k, v in value.items()}
    return [_slotted(v) for v in value] if isinstance(value, list) else value


def _slots(value: Any) -> int:
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(_slots, value)) if isinstance(value, list) else int(value == SLOT)


def _common(one: str, other: str) -> int:
    """Characters with which both texts begin."""
    unequal = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unequal, min(len(one), len(other)))


def _same(end: str, text: str) -> int:
    """Characters of `end` with which `text` begins, without a part of a tag."""
    count = _common(end, text)
    cut = (m.start() for m in TAG.finditer(end) if m.start() < count < m.end())
    return next(cut, count)
