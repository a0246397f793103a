"""Makes the texts of a whole record safe to print on a terminal."""

from __future__ import annotations

from typing import Any

import msgspec

from memconsole.sanitize import clean


def clean_texts(value: Any) -> Any:
    """`value` with every text in its structs, lists and dicts cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, msgspec.Struct):
        texts = {
            name: clean_texts(inner)
            for name in value.__struct_fields__
            if isinstance(inner := getattr(value, name), str | msgspec.Struct | dict | list | tuple)
        }
        return msgspec.structs.replace(value, **texts) if texts else value
    if isinstance(value, dict):
        return {clean_texts(key): clean_texts(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int | float):
            return value
        return type(value)(clean_texts(inner) for inner in value)
    return value
