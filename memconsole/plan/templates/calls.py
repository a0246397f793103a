"""Calls of tools in messages: their arguments as text, as OpenAI has them, and as objects, as most templates want them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from memconsole.plan.templates.chat import Message, RecordError

ARGUMENTS = "arguments"


def takes_objects(write: Callable[[list[Message]], str]) -> bool:
    """Whether a template takes objects for the arguments of calls. One that joins them to text takes only text."""
    object_then_text: tuple[Any, ...] = ({}, "{}")
    for arguments in object_then_text:
        function = {"name": "add", ARGUMENTS: arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            write([{"role": "user", "content": "Add."}, calling])
        except RecordError:
            continue
        return not isinstance(arguments, str)
    return True


def with_objects(message: Message) -> Message:
    """The message, with objects for the arguments of its calls that are the JSON of an object."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _with_object(call["function"])}
    text = call.get(ARGUMENTS)
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return call
    return {**call, ARGUMENTS: arguments} if isinstance(arguments, dict) else call
