"""Formats bytes, durations and counts for people."""

from __future__ import annotations

import math
from typing import Any

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


def format_bytes(count: float) -> str:
    """``3.1 GiB``: three significant figures, binary units, with the sign."""
    size = abs(count)
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit * 0.9995:
            return f"{_three(count / unit)} {name}"
    return f"{count:.0f} B"


def parse_bytes(text: str) -> int:
    """The bytes of ``12GiB``, ``12 GB`` (powers of ten) or a plain number.

    Raises `ValueError` for anything else, including negative and infinite amounts.
    """
    word = text.strip().lower().replace("_", "").replace(" ", "")
    for suffix, unit in (
        ("kib", KIB), ("mib", MIB), ("gib", GIB), ("tib", TIB),
        ("kb", 10**3), ("mb", 10**6), ("gb", 10**9), ("tb", 10**12), ("b", 1),
    ):  # fmt: skip
        if word.endswith(suffix):
            return _whole(word[: -len(suffix)], unit)
    return _whole(word, 1)


def _whole(number: str, unit: int) -> int:
    count = float(number) * unit
    if not 0 <= count < math.inf:
        raise ValueError(f"not a number of bytes: {number}")
    return round(count)


def format_count(count: float) -> str:
    """``34.1 M``, ``1.24 B``: parameters or tokens."""
    size = abs(count)
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if size >= unit * 0.9995:
            return f"{_three(count / unit)} {name}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """``45 s``, ``3 min 05 s``, ``2 h 14 min``, ``3 d 4 h``; ``n/a`` if not finite."""
    if not math.isfinite(seconds):
        return "n/a"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_clock(seconds: float) -> str:
    """A duration that is counted up, in whole seconds: ``4 s``, ``3 min 05 s``."""
    return format_duration(int(seconds)).replace(".0 s", " s")


def format_rate(per_second: float) -> str:
    """``8,321``; ``0.38`` where whole numbers would say little."""
    return f"{per_second:,.0f}" if per_second >= 9.95 or not per_second else f"{per_second:.2g}"


def format_measure(value: float) -> str:
    """A loss or another measure: four decimals, and fewer from a thousand on; ``2.594e+10`` from a billion on, and three
    digits below a thousandth."""
    size = abs(value)
    if 0 < size < 0.001:
        return f"{value:.3g}"
    if size >= 1e9:
        return f"{value:.3e}"
    return f"{value:,.{4 if size < 1000 else 1 if size < 100_000 else 0}f}"


def format_step(seconds: float) -> str:
    """``310 ms``, ``4.2 ms``, ``85 µs``: a duration that may be well below a second."""
    if not 0 < seconds < 0.9995:
        return format_duration(seconds)
    if seconds < 0.000_9995:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def value_word(value: Any) -> str:
    """A setting's value as text; a boolean is on or off."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
