"""Typed access to a Hugging Face config.json; every error names the file, the key and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memconsole.plan.plan import PlanError, printable, quote

LARGEST = 2**31
"""Upper limit of any size, so that a damaged file cannot cause endless work."""


def refusal(where: str, key: str, value: Any, expected: str) -> PlanError:
    """``config.json: key = value: expected …``, on one line."""
    return PlanError(
        f"model.name: {printable(where)}: {key} = {quote(value)}: expected {expected}", "model.name"
    )


class Config:
    """A mapping read key by key. A key set to null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def missing(self, key: str) -> bool:
        return self._values.get(key) is None

    def says_none(self, key: str) -> bool:
        """Whether the key is there and null, which for a few keys is not the default."""
        return key in self._values and self._values[key] is None

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least one."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise refusal(self.where, key, value, "a whole number >= 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e30:
            raise refusal(self.where, key, value, "a number > 0")
        return float(value)

    def amount(self, key: str) -> float:
        """A finite number of at least zero; 0 if missing."""
        return 0.0 if self._values.get(key) in (None, 0) else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise refusal(self.where, key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise refusal(self.where, key, value, "text")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """A nested table; empty if missing."""
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise refusal(self.where, key, value, "a table")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive finite numbers."""
        value = self._values.get(key)
        if not isinstance(value, list):
            raise refusal(self.where, key, value, "a list of numbers > 0")
        return tuple(Config({key: one}, self.where).number(key) for one in value)

    def flags(self, key: str) -> list[bool]:
        """A list of 0 and 1, or of true and false; empty if missing."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or any(one not in (0, 1) for one in value):
            raise refusal(self.where, key, value, "a list of 0 and 1")
        return [bool(one) for one in value]

    def layer_types(self) -> list[str]:
        """The kind of attention of each layer; empty if the file does not say."""
        value = self._values.get("layer_types")
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
            raise refusal(self.where, "layer_types", value, "a list of names")
        return value

    def only(self, key: str, default: str | None, allowed: tuple[str | None, ...]) -> None:
        """Refuse any value of `key` that is not allowed."""
        value = self._values.get(key)
        value = default if value is None else value
        if value not in allowed:
            words = " or ".join("null" if word is None else word for word in allowed)
            raise refusal(self.where, key, value, words)

    def quotient(self, key: str, width: int, heads: int) -> int:
        """The head size if `width` is split evenly over `heads`."""
        if width % heads:
            raise refusal(self.where, key, width, f"a multiple of {heads} heads")
        return width // heads
