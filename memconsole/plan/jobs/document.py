"""Writes a job file as YAML, from plain dicts, lists, texts and numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/~][\w./:~+-]*", re.ASCII)
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "~", "y", "n"})


def yaml(document: Mapping[str, Any]) -> str:
    """The document as YAML. Texts of several lines stay readable."""
    return "\n".join(_lines(document, 0)) + "\n"


def _lines(value: Any, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{pad}{_scalar(key)}:", inner, depth)
    else:
        for inner in value:
            if isinstance(inner, Mapping) and inner:
                first, *rest = _lines(inner, depth + 1)
                yield f"{pad}- {first.lstrip()}"
                yield from rest
            else:
                yield from _entry(f"{pad}-", inner, depth)


def _entry(head: str, inner: Any, depth: int) -> Iterator[str]:
    if isinstance(inner, Mapping | list | tuple) and inner:
        yield head
        yield from _lines(inner, depth + 1)
    elif isinstance(inner, str) and "\n" in inner:
        yield f"{head} |"
        for line in inner.rstrip("\n").split("\n"):
            yield f"{'  ' * (depth + 1)}{line}" if line else ""
    else:
        yield f"{head} {_scalar(inner)}"


def _scalar(value: Any) -> str:
    """A value on one line. JSON's texts are YAML's, too."""
    plain = isinstance(value, str) and _PLAIN.fullmatch(value) and not value.endswith(":")
    if plain and value.lower() not in _WORDS:
        return str(value)
    return json.dumps(value, ensure_ascii=False)
