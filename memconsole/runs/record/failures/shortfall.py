"""How much memory a failed run held and requested when memory ran out."""

from __future__ import annotations

import re

import msgspec

from memconsole.units import format_bytes

_UNITS = {
    "": 1, "bytes": 1, "b": 1, "byte": 1,
    "k": 2**10, "kib": 2**10, "kb": 2**10, "m": 2**20, "mib": 2**20, "mb": 2**20,
    "g": 2**30, "gib": 2**30, "gb": 2**30, "t": 2**40, "tib": 2**40, "tb": 2**40,
}  # fmt: skip
"""torch, XLA and numpy all count in powers of two, whatever they call them."""

_AMOUNT = r"([\d,]+(?:\.\d+)?)\s*([kmgt]i?b|[kmgt]\b|bytes?|b\b|)"
_REQUESTED = (
    rf"(?:tried|trying) to allocate {_AMOUNT}",  # torch on any device, XLA
    rf"out of memory allocating {_AMOUNT}",  # XLA on a CPU
    rf"unable to allocate {_AMOUNT}",  # numpy
    rf"failed to allocate {_AMOUNT}",  # XLA's pools
)
_HELD = (
    rf"of the allocated memory {_AMOUNT} is allocated by pytorch",  # torch on CUDA and ROCm
    rf"mps allocated: {_AMOUNT}",
)
_MEMORY = (
    ("defaultcpuallocator", "host RAM"),
    ("cuda out of memory", "GPU memory"),
    ("hip out of memory", "GPU memory"),
    ("mps backend out of memory", "unified memory"),
    ("unable to allocate", "host RAM"),
)
"""Words of frameworks' messages, and the memory that ran out if a message contains them."""


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the allocated column. None: not reported."""

    phase: str
    """The trainer's phase when memory ran out."""
    held_bytes: int | None
    """Live tensor bytes when the request failed. Tensors freed before the count are missing."""
    requested_bytes: int | None
    peak_bytes: int | None = None
    """The highest measured value."""
    needed_bytes: int
    """The least the run needed: its measured peak, or the held bytes plus the request."""


def requested_bytes(message: str) -> int | None:
    """The size of the failed allocation, from a framework's error message."""
    return _first(_REQUESTED, message)


def lacked_words(message: str) -> str:
    """A framework's error message in plain words: ``asked for 2.00 GiB, more GPU memory than is left``."""
    lowered = message.lower()
    memory = next((name for sign, name in _MEMORY if sign in lowered), "memory")
    asked = requested_bytes(message)
    if not asked:
        return f"asked for more {memory} than is left"
    return f"asked for {format_bytes(asked)}, more {memory} than is left"


def held_bytes(message: str) -> int | None:
    """The live tensor bytes, from a framework's error message; only GPU allocators report them."""
    return _first(_HELD, message)


def shortfall(
    phase: str,
    peak: int | None,
    held: int | None,
    requested: int | None,
    counts_held: bool = True,
) -> Shortfall | None:
    """The shortfall of a run; None if nothing was measured.

    `counts_held`: the held bytes were in use when the request failed, so both were needed at once.
    """
    together = (held or 0) + (requested or 0) if counts_held else 0
    needed = max(peak or 0, together, requested or 0)
    if not needed:
        return None
    return Shortfall(
        phase=phase,
        held_bytes=held,
        requested_bytes=requested,
        peak_bytes=peak,
        needed_bytes=needed,
    )


def _first(patterns: tuple[str, ...], message: str) -> int | None:
    lowered = message.lower()
    for pattern in patterns:
        match = re.search(pattern, lowered)
        if match:
            return int(float(match[1].replace(",", "")) * _UNITS[match[2]])
    return None
