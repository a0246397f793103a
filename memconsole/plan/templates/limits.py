"""How much one rendering of a template may make, and how long it may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from types import GeneratorType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from jinja2.utils import Namespace

MOST_CHARACTERS = 16 << 20
"""The longest text that one operation may make; an element of a list counts as `ELEMENT` characters."""
MOST_IN_ALL = 256 << 20
"""What all operations and repetitions of one rendering may make; each counts as `ELEMENT` characters more."""
MOST_SECONDS = 2.0
"""Of one core, for one rendering. A chat of a hundred messages takes a few milliseconds."""
ELEMENT = 16
"""Characters that one operation, or one element of a list, counts as."""
_CHECKED_EVERY = 64 * ELEMENT
"""What is made between two checks of the limits."""
MOST_BITS = 1 << 16
"""Of an integer that is multiplied or divided."""
_SINGLE, _LISTS = frozenset({int, float, bool, type(None), range}), frozenset({list, tuple})


def check_size(size: int) -> None:
    """Raise `SecurityError` for a text of more than `MOST_CHARACTERS`."""
    if size > MOST_CHARACTERS:
        raise SecurityError(f"it would write more than {MOST_CHARACTERS >> 20} MiB of text")


def extent(value: Any) -> int:
    """The characters of a text; of a list or an object, all that it holds. A list that is held twice counts twice, because
    it is written twice. Counting ends soon after `MOST_CHARACTERS`."""
    if isinstance(value, str | bytes):
        return len(value)
    size, waiting = 0, [value]
    while waiting and size <= MOST_CHARACTERS:
        part = waiting.pop()
        kind = type(part)
        if kind in _SINGLE or isinstance(part, Undefined):
            continue
        if kind is Namespace:
            part = object.__getattribute__(part, "_Namespace__attrs")
        if kind is str or isinstance(part, str | bytes):
            size += len(part)
        elif kind in _LISTS or isinstance(part, Collection):
            size += ELEMENT * len(part)
            if size <= MOST_CHARACTERS:
                waiting += part
                if isinstance(part, Mapping):
                    waiting += part.values()
    return size


def limit_product(operator: str, left: int, right: int) -> None:
    """Raise `SecurityError` for an operation on integers that would take long."""
    sizes = left.bit_length(), right.bit_length()
    bits = {"*": sum(sizes), "**": sizes[0] * max(right, 0)}.get(operator, max(sizes))
    if bits > MOST_BITS:
        raise SecurityError(f"an integer would have more than {MOST_BITS:,} bits")


class Allowance:
    """What a rendering may still make. ``with allowance:`` encloses each one; another thread waits."""

    def __init__(self) -> None:
        self._rendering = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._left, self._left_at_check = MOST_IN_ALL, MOST_IN_ALL
        self._until, self._begun = time.monotonic() + MOST_SECONDS, time.thread_time()

    def __enter__(self) -> None:
        self._rendering.acquire()
        self._begin()

    def __exit__(self, *_: object) -> None:
        self._rendering.release()

    def spend(self, size: int = ELEMENT) -> None:
        """Count an operation that makes `size` characters. Raises `SecurityError`."""
        self._left -= size
        if self._left < self._left_at_check - _CHECKED_EVERY:
            self._check()

    def _check(self) -> None:
        """Raise `SecurityError` if the rendering has made too much, or takes too long."""
        self._left_at_check = self._left
        if self._left < 0:
            raise SecurityError(
                f"it would make more than {MOST_IN_ALL >> 20} MiB in all, or repeat millions of times"
            )
        # The time of the thread alone counts; asking for it takes longer.
        if time.monotonic() > self._until and time.thread_time() - self._begun > MOST_SECONDS:
            raise SecurityError(f"it takes more than {MOST_SECONDS:.0f} seconds")

    def count_part(self, value: Any) -> Any:
        """`value`, which is a part of another one. Raises `SecurityError`."""
        self.spend(ELEMENT * (1 + len(value)) if isinstance(value, str | list | tuple) else ELEMENT)
        return value

    def count_made(self, value: Any) -> Any:
        """`value`, which an operation has made. Raises `SecurityError`."""
        kind = type(value)
        if kind is str:
            size = len(value)
            if size > MOST_CHARACTERS:
                check_size(size)
            self.spend(ELEMENT + size)
        elif kind in _SINGLE:
            self.spend()
        elif kind is GeneratorType:
            return map(self.count_made, value)
        else:
            size = extent(value)
            check_size(size)
            if size > _CHECKED_EVERY:
                self._check()
            self.spend(ELEMENT * (1 + len(value)) if isinstance(value, list | tuple) else ELEMENT)
        return value
