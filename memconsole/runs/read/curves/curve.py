"""Curves as screens draw them."""

from __future__ import annotations

import msgspec


class Curve(msgspec.Struct, frozen=True):
    """A decimated series with ascending `steps`. Minima, maxima and the last value are exact."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """The series as pairs."""
        return tuple((float(s), v) for s, v in zip(self.steps, self.values, strict=False))


class GaugeCurves(msgspec.Struct, frozen=True):
    """Bytes by step: peaks of allocated bytes, and what the device and the host held."""

    allocated: Curve = Curve()
    device: Curve = Curve()
    host: Curve = Curve()


class SeriesCurves(msgspec.Struct, frozen=True):
    """Curves of the values that steps log besides their loss, by step."""

    gradient_norm: Curve = Curve()
    learning_rate: Curve = Curve()
    units_per_second: Curve = Curve()
