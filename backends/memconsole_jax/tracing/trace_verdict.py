"""A compiler's out-of-memory verdict as bytes."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)\s*([KMGT]?)(?:i?B)?"
_TOTAL = re.compile(rf"[Tt]otal hbm usage >= {_SIZE}")
"""libtpu's sum of program, arguments and the runtime's reserve."""
_PATTERNS = (
    # libtpu before it assigns buffers: arguments are among what it counts
    re.compile(rf"total memory required for HLO temporaries \({_SIZE}\)"),
    _TOTAL,
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
    # XLA's other backends
    re.compile(rf"(?:would need|requires|trying to allocate) {_SIZE}(?:ytes)?"),
)
_RESERVED = re.compile(rf"reserved\s+{_SIZE}")


def is_out_of_memory(message: str) -> bool:
    """Whether a compiler's error says that the program does not fit."""
    return "RESOURCE_EXHAUSTED" in message or "Ran out of memory" in message


def needed_bytes(message: str) -> int | None:
    """Total bytes that the program needs, without the runtime's own reserve; None if the message does not say.

    Compilers print three or four digits, so the bytes are only that exact.
    """
    for pattern in _PATTERNS:
        found = pattern.search(message)
        if found:
            total = _bytes(*found.groups()[:2])
            reserved = _RESERVED.search(message) if pattern is _TOTAL else None
            return total - (_bytes(*reserved.groups()) if reserved else 0)
    return None


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
