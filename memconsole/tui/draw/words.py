"""Numbers and states as short texts."""

from __future__ import annotations

from memconsole.devices.reading import Missing
from memconsole.memory.verdict import Verdict
from memconsole.runs.read.shown.words import Shown, state_word
from memconsole.units import format_bytes, format_duration, format_measure, format_rate, format_step

STATES: dict[str, tuple[str, str]] = {
    "queued": ("◌", "accent"),
    "starting": ("○", "accent"),
    "running": ("●", "good"),
    "unsupervised": ("●", "warn"),
    "suspended": ("‖", "bad"),
    "paused": ("‖", "warn"),
    "cannot save": ("▲", "bad"),
    "stopping": ("■", "warn"),
    "finished": ("✓", "good"),
    "stopped": ("■", "accent"),
    "failed": ("✗", "bad"),
    "refused": ("✗", "bad"),
    "killed": ("✗", "bad"),
    "orphaned": ("✗", "bad"),
    "lost": ("✗", "bad"),
    "damaged": ("✗", "bad"),
}
"""A mark and a role for each state; the state's name always stands next to it."""


def state_mark(run: Shown) -> tuple[str, str]:
    """The mark and role of a run's state."""
    return STATES.get(state_word(run), ("?", "warn"))


VERDICTS: dict[Verdict, tuple[str, str]] = {
    Verdict.FITS: ("✓", "good"),
    Verdict.TIGHT: ("▲", "warn"),
    Verdict.DOES_NOT_FIT: ("✗", "bad"),
}
"""A mark and a role for each verdict on a plan."""


def verdict_mark(verdict: Verdict, otherwise: str = str(Verdict.DOES_NOT_FIT)) -> str:
    """``✓ fits``, ``▲ tight``, or ``✗`` and the words for what does not fit."""
    words = otherwise if verdict is Verdict.DOES_NOT_FIT else verdict
    return f"{VERDICTS[verdict][0]} {words}"


def signed_bytes(change: int) -> str:
    """``−12 MiB``, ``+3.1 MiB``, or ``0``."""
    if change == 0:
        return "0"
    return ("−" if change < 0 else "+") + format_bytes(abs(change))


def difference_word(percent: float) -> str:
    """How a prediction differs from its measurement, in per cent of it: ``6 % less``, ``5 % more``, ``equal``."""
    whole = round(percent)
    return f"{abs(whole):,} % {'more' if whole > 0 else 'less'}" if whole else "equal"


def bytes_or_reason(value: int | Missing | None) -> str:
    """A byte count, or ``n/a — reason``."""
    if isinstance(value, Missing):
        return f"n/a — {value.reason}"
    return "n/a — not reported" if value is None else format_bytes(value)


def number_or_reason(value: float | Missing, unit: str) -> str:
    """``98 %``, or ``n/a — reason``."""
    return f"n/a — {value.reason}" if isinstance(value, Missing) else f"{value:.0f} {unit}"


def loss_word(loss: float | None, reason: str = "not finite") -> str:
    """A loss, or ``n/a — reason``."""
    return f"n/a — {reason}" if loss is None else measure_word(loss)


def measure_word(value: float) -> str:
    """A loss or measure: three decimals, or three significant digits if it is small; ``25.94M`` if it is large."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size <= abs(value) < 1000 * size:
            return f"{value / size:.2f}{letter}"
    if abs(value) >= 1000:
        return format_measure(value)
    return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


def rate_word(rate: float | None) -> str:
    """Units per second, such as tokens or windows."""
    if rate is None:
        return "—"
    return format_rate(rate) if rate < 99_950 else f"{rate / 1000:,.0f}k"


def duration_word(seconds: float | None) -> str:
    """A duration, or a dash."""
    return "—" if seconds is None else format_duration(max(0.0, seconds))


def step_word(seconds: float) -> str:
    """The time of one step, in milliseconds or microseconds below a second."""
    return format_step(seconds)


def minutes_word(minutes: float | None) -> str:
    """Minutes, with two decimals below ten."""
    if minutes is None:
        return "—"
    return f"{minutes:.2f}" if minutes < 10 else f"{minutes:,.1f}"


def age_word(seconds: float) -> str:
    """Roughly how long ago."""
    if seconds < 60:
        return "now"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min ago"
    if seconds < 86400:
        return f"{seconds / 3600:.0f} h ago"
    return f"{seconds / 86400:.0f} d ago"
