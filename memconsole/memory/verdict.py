"""Whether a plan fits its device: the one rule, and the words for it."""

from __future__ import annotations

from enum import StrEnum

from memconsole.units import format_bytes


class Verdict(StrEnum):
    """The answer for one plan on one device."""

    FITS = "fits"
    """Even the high end of the band is within the usable memory."""
    TIGHT = "tight"
    """The estimate is within the usable memory, the high end of its band is not."""
    DOES_NOT_FIT = "does not fit"


def verdict_of(needed: int, at_most: int, usable: int, *, refused: bool = False) -> Verdict:
    """The verdict on a plan that needs `needed` bytes, or up to `at_most`, on a device with `usable` bytes. A plan whose
    program the compiler `refused` does not fit."""
    if refused or needed > usable:
        return Verdict.DOES_NOT_FIT
    return Verdict.FITS if at_most <= usable else Verdict.TIGHT


def verdict_words(verdict: Verdict, needed: int, at_most: int, usable: int) -> str:
    """``fits, 3.1 GiB free``, ``tight, 300 MiB free or up to 1.2 GiB over``, ``does not fit, 1.2 GiB over``."""
    free = usable - needed
    if verdict is Verdict.FITS:
        return f"{verdict}, {format_bytes(free)} free"
    if verdict is Verdict.TIGHT:
        return (
            f"{verdict}, {format_bytes(free)} free or up to {format_bytes(at_most - usable)} over"
        )
    return f"{verdict}, {format_bytes(-free)} over" if free < 0 else f"{verdict}: the compiler refuses the program"  # fmt: skip
