"""The environment that templates run in: nothing outside is reached, and no short expression writes a huge text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import do_center, do_format, do_indent, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context

MOST_CHARACTERS = 16 << 20
"""The longest text, and the longest list, that one operator or filter may make."""
_PERCENT = re.compile(r"%(?:\([^)]*\))?([-+ #0\d.*]*)")
"""A field such as ``%10.2f``, up to its type."""
_BRACES = re.compile(r"\{[^{}:]*:((?:[^{}]|\{[^{}]*\})*)\}")
"""A field such as ``{:10.2f}``."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose operators, filters and methods of text refuse sizes beyond `MOST_CHARACTERS`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters.update(center=_center, format=_format, indent=_indent, join=_join)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(times, int):
                    limited(len(one) * times)
        elif operator == "%" and isinstance(left, str):
            limited(_widths(_PERCENT, left, right if isinstance(right, tuple) else (right,)))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            limited(left.bit_length() * right // 8)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            if method.__name__ == "format":
                limited(_widths(_BRACES, text, (*args, *kwargs.values())))
            else:  # center, ljust, zfill, …
                given = (*args, *kwargs.values())
                limited(max((n for n in given if isinstance(n, int)), default=0))
        return super().call(__context, __obj, *args, **kwargs)


def limited(size: int) -> None:
    """Raise `SecurityError` for a text of more than `MOST_CHARACTERS`."""
    if size > MOST_CHARACTERS:
        raise SecurityError(f"it would write more than {MOST_CHARACTERS >> 20} MiB of text")


def _widths(fields: re.Pattern[str], text: str, values: Iterable[Any]) -> int:
    """The sum of the widths and precisions in a format text. If it takes one of them from `values`, all of these count."""
    found = [word for field in fields.findall(text) for word in re.findall(r"\d+|[*{]", field)]
    size = sum(int(word) for word in found if word.isdecimal())
    if not all(word.isdecimal() for word in found):
        size += sum(value for value in values if isinstance(value, int) and value > 0)
    return size


def _center(value: Any, width: int = 80) -> str:
    limited(width)
    return do_center(value, width)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    limited(_widths(_PERCENT, str(value), (*args, *kwargs.values())))
    return do_format(value, *args, **kwargs)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    step = len(width) if isinstance(width, str) else width
    limited(step * (str(s).count("\n") + 1))
    return do_indent(s, width, first, blank)


@pass_eval_context
def _join(
    context: EvalContext, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    parts = [str(part) for part in value]
    limited(sum(map(len, parts)) + len(str(d)) * len(parts))
    return str(d).join(parts)
