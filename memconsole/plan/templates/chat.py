"""Chats as messages with a role and a content, from the layouts in which they are stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

COLUMNS = ("messages", "conversations", "prompt and completion")
"""The layouts: OpenAI's, ShareGPT's, and a question with its answer."""
ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "bing", "bard", "model"), "assistant"),
}
"""Other names of roles."""
MAIN_ROLES = ("system", "user", "assistant")
DEVELOPER = "developer"
"""OpenAI's newer name of `system`, which few templates know."""
CHAT_ANSWER = "answer"
"""Name of a chat's answer: its last message, if the assistant wrote it."""
OPTIONS = "chat_template_kwargs"
"""Field of a chat with values for its template, such as `enable_thinking`, as datasets of TRL have it."""
FIELDS = ("system", "tools", OPTIONS)
"""What a chat may have beside its messages."""
CHAT_COLUMNS = ("messages", "conversations", "prompt", "completion", *FIELDS)
"""All fields of a chat that templates read."""
CHOSEN, REJECTED = "chosen", "rejected"
PREFERENCE = ("prompt", CHOSEN, REJECTED)
"""The layout of preferences, as TRL names it. The prompt may be missing if both answers are whole chats."""
LEARNED = ("weight", "train", "training")
"""Fields of a message that are 0 or false if it is not learned, as data for OpenAI, Mistral and Axolotl have them."""
CALLS, TOOLS, REASONING = "calls of tools", "tools", "reasoning"
PARTS = {
    CALLS: ("tool_calls", "function_call"),
    TOOLS: ("tools",),
    REASONING: ("reasoning_content", "reasoning", "thinking"),
}
"""Parts of a chat that not every template writes, and the fields that hold them."""

Message = dict[str, Any]


class RecordError(ValueError):
    """A record that a template cannot write. The message is one clause without the record's
    place."""


def is_chat(fields: Mapping[str, Any]) -> bool:
    """Whether a record with these fields is a chat."""
    return (
        "messages" in fields
        or "conversations" in fields
        or ("prompt" in fields and "completion" in fields)
    )


def messages_of(record: Mapping[str, Any]) -> list[Message]:
    """The messages of a record in one of the layouts. Its field `system` is the first one, unless they begin with a
    system message. Raises `RecordError`."""
    messages, system = _of_layout(record), record.get("system")
    if system is not None and not isinstance(system, str):
        raise RecordError(f'field "system" holds {_kind(system)}, expected text')
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def is_learned(message: Message) -> bool:
    """Whether the tokens of a message may be learned. A message without a field that tells is learned."""
    return all(message.get(name, True) for name in LEARNED)


def _of_layout(record: Mapping[str, Any]) -> list[Message]:
    """The messages in the fields of a layout. Raises `RecordError`, also if the record has none of the layouts."""
    for column in ("messages", "conversations"):
        if record.get(column) is not None:
            return message_list(record[column], column)
    if record.get("prompt") is not None and record.get("completion") is not None:
        messages: list[Message] = []
        for column, role in (("prompt", "user"), ("completion", "assistant")):
            value = record[column]
            if isinstance(value, str):
                value = [{"role": role, "content": value}]
            messages += message_list(value, column)
        return messages
    for column in ("messages", "conversations", "prompt", "completion"):
        if is_chat(record) and column in record and record[column] is None:
            raise RecordError(f'field "{column}" is null')
    hint = (
        "; preferences are learned with train.objective = dpo, orpo or simpo"
        if "chosen" in record
        else ""
    )
    raise RecordError(f"is no chat: it has {_listed(record)}, expected {', '.join(COLUMNS)}{hint}")


def tools_of(record: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a record: a list, or its JSON as tables often hold it; None if it has none. Raises `RecordError`."""
    value = _parsed(record.get("tools"), "tools", "list")
    if value is not None and not isinstance(value, list):
        raise RecordError(f'field "tools" holds {_kind(value)}, expected a list of tools')
    return value


def options_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values that a record has for its template: an object, or its JSON. Raises `RecordError`."""
    value = _parsed(record.get(OPTIONS), OPTIONS, "object") or {}
    if not isinstance(value, Mapping):
        raise RecordError(f'field "{OPTIONS}" holds {_kind(value)}, expected an object')
    return value


def _parsed(value: Any, field: str, expected: str) -> Any:
    """`value`, or what it holds if it is JSON text; None if the text is empty. Raises `RecordError`."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise RecordError(f'field "{field}" holds text that is no JSON {expected}') from None


def message_list(value: Any, column: str) -> list[Message]:
    """The messages of a field `column`: a list, or its JSON as tables often hold it. Raises `RecordError`."""
    value = _parsed(value, column, "list")
    if not isinstance(value, list) or not value:
        text = "" if column in ("messages", "conversations") else "text or "
        raise RecordError(
            f'field "{column}" holds {_kind(value)}, expected {text}a list of messages'
        )
    return [_message(one, f"{column}[{number}]") for number, one in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    """A message in OpenAI's layout, from that one or ShareGPT's. `where` names its place in errors. Raises `RecordError`."""
    if not isinstance(value, Mapping):
        raise RecordError(f'field "{where}" holds {_kind(value)}, expected a message')
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if not isinstance(role, str):
        raise RecordError(f'field "{where}" has no "role" (or "from")')
    if isinstance(content, list):
        content = "".join(_text_of_part(part, where) for part in content)
    if content is None and value.get("tool_calls"):
        content = ""
    if content is None and ("content" in value or "value" in value):
        raise RecordError(f'field "{where}" has a "content" (or "value") that is null')
    if not isinstance(content, str):
        raise RecordError(f'field "{where}" has no "content" (or "value") that is text')
    for name in LEARNED:
        if value.get(name, 1) not in (0, 1, None):
            raise RecordError(f'field "{where}" has a "{name}" other than 0, 1, true and false')
    kept = {k: v for k, v in value.items() if k not in ("from", "value") and v is not None}
    return {**kept, "role": ROLES.get(role, role), "content": content}


def _text_of_part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise RecordError(f'field "{where}" has a part that is no text')
    return text


def _listed(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record)) or "no fields"


def _kind(value: Any) -> str:
    one_list = "a list" if value else "an empty list"
    names: dict[type, str] = {
        str: "text",
        list: one_list,
        dict: "an object",
        int: "a number",
        float: "a number",
    }
    return "nothing" if value is None else names.get(type(value), "a value")
