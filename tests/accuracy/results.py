"""How well an estimate meets its truth: the records `make accuracy` writes and the table it makes of them.

A part of `make accuracy` is a script that compares estimates with one kind of truth and ends with
``write(Part(...))``; a part whose truth is not at hand on this machine ends with `unavailable(...)`, and
what it wrote last, elsewhere, stays.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import msgspec

FOLDER = Path(__file__).with_name("results")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "estimates.md"
"""The page that shows the table."""
BEGIN, END = "<!-- accuracy -->", "<!-- /accuracy -->"
"""The section of the page between these is written by `into_page`."""
UNAVAILABLE = 3
"""Exit status of a part whose truth cannot be asked here."""
MIB = 2**20


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One plan, estimated and measured."""

    plan: str
    estimated_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Estimate over truth, less one: negative where the estimate is too low."""
        return self.estimated_bytes / self.measured_bytes - 1


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """What a row must reach, as shares; None: not asked."""

    median: float | None = None
    """Most that the middle absolute error may be."""
    under: float | None = None
    """Most that any estimate may be too low."""
    within: float | None = None
    """Most that any estimate may be off, either way."""

    def __str__(self) -> str:
        asked = (
            ("median ≤ {:.2g} %", self.median),
            ("none under by > {:.2g} %", self.under),
            ("all within {:.2g} %", self.within),
        )
        return ", ".join(text.format(100 * limit) for text, limit in asked if limit is not None)


class Errors(msgspec.Struct, frozen=True, kw_only=True, tag="errors"):
    """A row of the table: one kind of estimate against one kind of truth."""

    estimate: str
    """With its tier, such as ``torch ~``."""
    truth: str
    bar: Bar
    cases: tuple[Case, ...]

    @property
    def median(self) -> float:
        return statistics.median(abs(case.error) for case in self.cases)

    @property
    def under(self) -> float:
        """The lowest estimate's error; 0 where none is too low."""
        return min(0.0, *(case.error for case in self.cases))

    @property
    def over(self) -> float:
        return max(0.0, *(case.error for case in self.cases))

    @property
    def met(self) -> bool:
        b = self.bar
        return (
            bool(self.cases)
            and (b.median is None or self.median <= b.median)
            and (b.under is None or -self.under <= b.under)
            and (b.within is None or max(-self.under, self.over) <= b.within)
        )

    def cells(self) -> list[str]:
        counted = f"{len(self.cases)} plans"
        shown = (
            f"{self.median:.2%}",
            *(f"{e:+.1%}" if e else "none" for e in (self.under, self.over)),
        )
        return [self.estimate, self.truth, counted, *shown, str(self.bar), _word(self.met)]


class Latency(msgspec.Struct, frozen=True, kw_only=True, tag="latency"):
    """A row of the table about time: how long many actions took."""

    estimate: str
    truth: str
    count: int
    median_seconds: float
    p99_seconds: float
    worst_seconds: float
    limit_seconds: float
    """What the 99th percentile must stay below."""

    @property
    def met(self) -> bool:
        return self.p99_seconds < self.limit_seconds

    def cells(self) -> list[str]:
        times = (self.median_seconds, self.p99_seconds, self.worst_seconds)
        middle, high, worst = (f"{1000 * seconds:.1f} ms" for seconds in times)
        bar = f"p99 < {1000 * self.limit_seconds:g} ms"
        return [
            self.estimate, self.truth, f"{self.count:,} times", middle, f"p99 {high}",
            f"worst {worst}", bar, _word(self.met),
        ]  # fmt: skip


class Timing(msgspec.Struct, frozen=True):
    """One plan's time, estimated and measured: seconds, or a factor of another plan's."""

    plan: str
    estimated: float
    measured: float

    @property
    def error(self) -> float:
        return self.estimated / self.measured - 1


class Times(msgspec.Struct, frozen=True, tag="times"):
    """A row of the table: estimated times against measured ones."""

    estimate: str
    truth: str
    factor: float
    """How many times too long or too short an estimate may be."""
    cases: tuple[Timing, ...]

    @property
    def met(self) -> bool:
        return all(1 / self.factor <= c.estimated / c.measured <= self.factor for c in self.cases)

    def cells(self) -> list[str]:
        errors = [case.error for case in self.cases]
        return [
            self.estimate, self.truth, f"{len(errors)} plans",
            f"{statistics.median(map(abs, errors)):.2%}",
            *(f"{e:+.1%}" if e else "none" for e in (min(0.0, *errors), max(0.0, *errors))),
            f"all within {self.factor:g}x", _word(self.met),
        ]  # fmt: skip


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one script measured, once."""

    name: str
    """Of the file in results/, such as ``torch-formula``."""
    command: str
    rows: tuple[Errors | Latency | Times, ...]
    date: str = ""
    machine: str = ""
    versions: dict[str, str] = {}
    note: str = ""
    """One sentence the page puts under the table."""


HEAD = ("estimate", "truth", "over", "median", "worst under", "worst over", "bar", "met")


def write(part: Part, packages: Iterable[str] = (), machine: str = "") -> None:
    """Store `part` with today's date, this machine and the versions of `packages`; print its rows and put the
    table of all parts into the page."""
    versions = {name: metadata.version(name) for name in packages}
    here = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    part = msgspec.structs.replace(
        part,
        date=part.date or time.strftime("%Y-%m-%d", time.gmtime()),
        machine=part.machine or machine or here,
        versions=part.versions or {"python": platform.python_version(), **versions},
    )
    FOLDER.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(part), indent=1)
    (FOLDER / f"{part.name}.json").write_bytes(text + b"\n")
    print(table([part]))
    into_page(stored())


def unavailable(what: str) -> NoReturn:
    """End a part whose truth is not at hand here; `what` says why, or what to install."""
    print(f"not measured here: {what}", file=sys.stderr)
    sys.exit(UNAVAILABLE)


def stored() -> list[Part]:
    """Everything measured so far, by file name; what truths a part keeps for itself has no rows."""
    texts = [file.read_bytes() for file in sorted(FOLDER.glob("*.json"))]
    parts = [text for text in texts if "rows" in msgspec.json.decode(text)]
    return [msgspec.json.decode(text, type=Part) for text in parts]


def table(parts: Iterable[Part]) -> str:
    """The rows of `parts` as Markdown."""
    rows = [list(HEAD), ["---", "---", *["---:"] * 4, "---", "---"]]
    rows += [row.cells() for part in parts for row in part.rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def section(parts: Iterable[Part]) -> str:
    """The page's section: the table, and where and with what each part was measured."""
    parts = list(parts)
    lines = [table(parts), ""]
    for part in parts:
        versions = ", ".join(f"{name} {version}" for name, version in part.versions.items())
        line = f"- `{part.command}`: {part.date}, {part.machine}; {versions}."
        lines.append(line + (f" {part.note}" if part.note else ""))
    return "\n".join(lines)


def into_page(parts: Iterable[Part], page: Path | None = None) -> None:
    """Put the section between the markers of `page` (`PAGE` if None). Raises `ValueError` where they are missing."""
    page = page or PAGE
    text = page.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text(f"{text[:begin]}\n{section(parts)}\n{text[end:]}", encoding="utf-8")


def _word(met: bool) -> str:
    return "yes" if met else "no"
