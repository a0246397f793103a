"""The environment that templates run in: nothing outside is reached, and what repeats, pads, replaces or joins text
makes no huge text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import do_center, do_format, do_indent, do_replace, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_eval_context

MOST_CHARACTERS = 16 << 20
"""The longest text, and the longest list, that one operator or filter may make."""
_FIELD = re.compile(r"%(?:%|(?P<name>\([^)]*\))?(?P<sizes>[-+ #0\d.*]*))")
"""A field such as ``%10.2f``, up to its type, or an escaped ``%%``."""
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "to_bytes"})
"""Methods whose first argument is the least length of what they return."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose operators, filters and methods that repeat, pad, replace or join refuse to make more than
    `MOST_CHARACTERS`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters.update(
            center=_center, format=_format, indent=_indent, join=_join, replace=_replace
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(times, int):
                    limited(len(one) * times)
        elif operator == "%" and isinstance(left, str):
            limited(_widths(left, right if isinstance(right, tuple) else (right,)))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            limited(left.bit_length() * right // 8)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            __self._limit_method(owner, getattr(method, "__name__", ""), args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _limit_method(
        self, owner: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise `SecurityError` if this method of `owner` would make too much."""
        first: Any = next(iter((*args, *kwargs.values())), 0)
        if name in _PADDING and isinstance(first, int):
            limited(first)
        elif name == "expandtabs" and isinstance(first, int):
            limited(first * len(owner))
        elif name == "replace" and len(args) > 1:
            _limit_replaced(owner, args[0], args[1])
        elif name == "join" and isinstance(first, list | tuple):
            limited(sum(len(part) + len(owner) for part in first))
        elif name == "format":
            _Measured(self).vformat(owner, args, kwargs)
        elif name == "format_map":
            _Measured(self).vformat(owner, (), first)


class _Measured(SandboxedFormatter):
    """Formats everything but the fields with a width or a precision, whose sum it limits."""

    def __init__(self, environment: Sandbox) -> None:
        super().__init__(environment)
        self._size = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        sizes = [int(word) for word in re.findall(r"\d+", format_spec)]
        self._size += sum(sizes)
        limited(self._size)
        return "" if sizes else str(super().format_field(value, format_spec))


def limited(size: int) -> None:
    """Raise `SecurityError` for a text of more than `MOST_CHARACTERS`."""
    if size > MOST_CHARACTERS:
        raise SecurityError(f"it would write more than {MOST_CHARACTERS >> 20} MiB of text")


def _widths(text: str, values: Sequence[Any]) -> int:
    """The sum of the widths and precisions in a format text with ``%``; those written ``*`` are in `values`."""
    left, size = iter(values), 0
    for field in _FIELD.finditer(text):
        if field["sizes"] is None:
            continue
        for word in re.findall(r"\d+|\*", field["sizes"]):
            number = int(word) if word.isdecimal() else next(left, 0)
            size += abs(number) if isinstance(number, int) else 0
        if not field["name"]:
            next(left, None)
    return size


def _limit_replaced(text: Any, old: Any, new: Any) -> None:
    places = len(text) + 1 if not old else text.count(old)
    limited(len(text) + places * len(new))


def _center(value: Any, width: int = 80) -> str:
    limited(width)
    return do_center(value, width)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    limited(_widths(str(value), args))
    return do_format(value, *args, **kwargs)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    step = len(width) if isinstance(width, str) else width
    limited(step * (str(s).count("\n") + 1))
    return do_indent(s, width, first, blank)


@pass_eval_context
def _replace(context: EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    _limit_replaced(str(s), str(old), str(new))
    return do_replace(context, s, old, new, count)


@pass_eval_context
def _join(
    context: EvalContext, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    parts = [str(part) for part in value]
    limited(sum(map(len, parts)) + len(str(d)) * len(parts))
    return str(d).join(parts)
