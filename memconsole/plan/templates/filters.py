"""Jinja's filters that could make huge text or take long, with limits."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import filters
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.utils import pass_context, pass_eval_context

from memconsole.plan.templates.limits import ELEMENT, check_size, extent

_MOST_SLOW = 64 << 10
"""Characters that a filter takes whose time grows with their square."""
_MOST_DIGITS = 300
_MOST_NAME = 1000
_FIELD = re.compile(r"%(?:%|(?P<name>\([^)]*\))?(?P<sizes>[-+ #0\d.*]*))")
"""A field such as ``%10.2f``, up to its type, or an escaped ``%%``."""


def limit_format(text: str, values: Any) -> None:
    """Raise `SecurityError` if ``text % values`` would be too long."""
    check_size(_widths(text, values if isinstance(values, tuple) else (values,)))
    if isinstance(values, Mapping):
        check_size(text.count("%") * extent(values))


def limit_replaced(text: Any, old: Any, new: Any) -> None:
    places = len(text) + 1 if not old else text.count(old)
    check_size(len(text) + places * len(new))


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


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Iterator[list[Any]]:
    check_size(ELEMENT * linecount)
    return filters.do_batch(value, linecount, fill_with)


def _center(value: Any, width: int = 80) -> str:
    check_size(width)
    return filters.do_center(value, width)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    limit_format(str(value), kwargs or args)
    return filters.do_format(value, *args, **kwargs)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    step = len(width) if isinstance(width, str) else width
    check_size(step * (str(s).count("\n") + 1))
    return filters.do_indent(s, width, first, blank)


@pass_eval_context
def _join(
    context: EvalContext, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    parts: list[str] = []
    size = 0
    for part in value:
        parts.append(str(part))
        size += len(parts[-1]) + len(str(d))
        check_size(size)
    return str(d).join(parts)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the chat templates of transformers get it: without escapes for HTML."""
    check_size(indent or 0)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    parts: list[str] = []
    size = 0
    for part in encoder.iterencode(value):
        parts.append(part)
        size += len(part)
        check_size(size)
    return "".join(parts)


@pass_eval_context
def _replace(context: EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    limit_replaced(str(s), str(old), str(new))
    return filters.do_replace(context, s, old, new, count)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > _MOST_DIGITS:
        raise SecurityError(f"round knows {_MOST_DIGITS} digits at most")
    return filters.do_round(value, precision, method)


def _slice(value: Any, slices: int, fill_with: Any = None) -> Iterator[list[Any]]:
    check_size(ELEMENT * slices)
    return filters.sync_do_slice(value, slices, fill_with)


@pass_context
def _sum(context: Context, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    environment: Any = context.environment
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    for one in iterable:
        start = environment.call_binop(context, "+", start, one)
    return start


@pass_context
def _wordwrap(context: Context, s: str, *args: Any, **kwargs: Any) -> str:
    wrap = functools.partial(filters.do_wordwrap, context.environment)
    end = kwargs.get("wrapstring", args[2] if len(args) > 2 else "")
    check_size(len(s) * (1 + len(end or "")))
    return str(_slow("wordwrap", wrap)(s, *args, **kwargs))


@pass_eval_context
def _urlize(context: EvalContext, value: str, *args: Any, **kwargs: Any) -> str:
    apply = functools.partial(filters.do_urlize, context)
    return str(_slow("urlize", apply)(value, *args, **kwargs))


def _slow(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose time grows with the square of the text, with a limit on the text's length."""

    def limited_filter(value: Any, *args: Any, **kwargs: Any) -> Any:
        if extent(value) > _MOST_SLOW:
            raise SecurityError(f"{name} takes {_MOST_SLOW >> 10} KiB of text at most")
        return apply(value, *args, **kwargs)

    return limited_filter


def _by_attribute(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks up an attribute of all elements in one operation, with a limit on the length of its name."""

    @functools.wraps(apply)
    def limited_filter(environment: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        names = (a for a in (*args, *kwargs.values()) if isinstance(a, str))
        if sum(map(len, names)) > _MOST_NAME:
            raise SecurityError(f"the name of an attribute has more than {_MOST_NAME} characters")
        if isinstance(value, str):  # a list of its characters
            check_size(ELEMENT * len(value))
        return apply(environment, value, *args, **kwargs)

    return limited_filter


LIMITED: dict[str, Callable[..., Any]] = {
    "batch": _batch,
    "center": _center,
    "format": _format,
    "groupby": _by_attribute(filters.do_groupby),
    "indent": _indent,
    "join": _join,
    "max": _by_attribute(filters.do_max),
    "min": _by_attribute(filters.do_min),
    "pprint": _slow("pprint", filters.do_pprint),
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "sort": _by_attribute(filters.do_sort),
    "striptags": _slow("striptags", filters.do_striptags),
    "sum": _sum,
    "title": _slow("title", filters.do_title),
    "tojson": _json,
    "unique": _by_attribute(filters.do_unique),
    "urlize": _urlize,
    "wordwrap": _wordwrap,
}
"""They replace Jinja's filters of the same name."""
