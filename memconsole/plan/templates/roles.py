"""Roles of messages that a template leaves out, or does not know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from memconsole.plan.templates.chat import MAIN_ROLES, Message, RecordError
from memconsole.plan.templates.rendered import MARKS


def unwritten_and_unknown(
    messages: Sequence[Message],
    mentioned: Collection[str],
    is_same: Callable[[Sequence[Message]], bool],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The roles beside the main ones that a template does not mention: those whose messages it does not write, and those
    that it writes as any other. `tool` never counts as unknown. `is_same` says whether the template writes the same of other
    messages."""
    unwritten, unknown = [], []
    for role in dict.fromkeys(one["role"] for one in messages if one["content"]):
        if role in MAIN_ROLES or role in mentioned:
            continue
        try:
            written = not is_same([one for one in messages if one["role"] != role])
        except RecordError:
            written = True
        if not written:
            unwritten.append(MARKS.sub("", role))
        elif role != "tool":
            unknown.append(MARKS.sub("", role))
    return tuple(unwritten), tuple(unknown)
