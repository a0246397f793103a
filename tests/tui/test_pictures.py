"""The pictures in screenshots/ are what the console shows, and README.md and docs/ lead to each of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "screenshots"
sys.path.insert(0, str(FOLDER))

from make import SHOWN
from picture import SIZES, name_of, rows_of, settle, svg_of
from scenes import SCENES, console, play
from stories import PICTURES

SEGMENT = re.compile(r"\S+(?: \S+)*")
"""Texts on a row are apart by two spaces or more."""
LABEL = re.compile(r"[A-Za-z][\w/,]*(?: [A-Za-z][\w/,]*)*")
MARKS = "0123456789○●·▲ "
"""Key and state before an optimization's name, and what marks a slow rank."""
DONE = "✓"
"""Marks a finished step of the start. A step that took no time has no row."""
FREE = ("output", "sample text", "epochs")
"""Panes whose rows are the run's own words, or depend on how far a run has come by the time of its picture."""
PICTURE = re.compile(r"screenshots/([\w.-]+\.(?:png|svg))")


def committed(name: str) -> list[str]:
    """The text of a committed picture."""
    return rows_of((FOLDER / f"{name}.svg").read_text(encoding="utf-8"))


def outline(rows: Sequence[str]) -> set[tuple[object, ...]]:
    """What does not depend on the machine: the screen and its keys, headings and labels and where they are.

    Numbers, bars, curves, finished steps, the rows of labels below them, and free text are left out.
    """
    found: set[tuple[object, ...]] = {("screen", SEGMENT.findall(rows[0])[1]), ("keys", rows[-1])}
    panes: dict[int, str] = {}
    steps: Counter[int] = Counter()  # rows of finished steps, by column
    for y, row in enumerate(rows[1:-1], 1):
        texts = [(match.start(), match[0]) for match in SEGMENT.finditer(row)]
        if len(texts) >= 4 and all(LABEL.fullmatch(text) for _, text in texts):
            found.add(("columns", *(text for _, text in texts)))
        if sum(" ─" in text for _, text in texts) > 1:
            panes.clear()  # a new band of panes side by side
        for x, text in texts:
            title, ruled, _ = text.partition(" ─")
            if ruled and title[0].isalpha():
                panes[x] = " ".join(LABEL.findall(title))
                steps[x] = 0
                found.add(("heading", y, x, panes[x]))
            elif text.startswith(DONE):
                steps[x] += 1
            elif panes.get(x, FREE[0]) not in FREE and (label := LABEL.match(text.lstrip(MARKS))):
                # A pane has its steps in its middle: each more moves what is below by none or one row.
                found.add(("label", 0 if steps[x] else y, x, label[0]))
    return found


OTHERS = str.maketrans("0123456789", "3456789012")
"""Another digit for each."""


def other_numbers(rows: Sequence[str]) -> Iterator[str]:
    """The same screen with other figures and curves; digits of a name, as in fp32, stay."""
    for row in rows:
        digits = re.sub(r"(?<![A-Za-z\d])\d+", lambda match: match[0].translate(OTHERS), row)
        yield re.sub("[\u2801-\u28ff]", "\u2812", digits).replace("█", "·")


@pytest.mark.parametrize("name", ["compare-runs-80x24", "run-live-160x48", "plan-exact-done-80x24"])
def test_an_outline_has_the_labels_and_not_the_numbers(name: str) -> None:
    rows = committed(name)
    lines = outline(rows)
    assert sum(line[0] == "heading" for line in lines) >= 2
    assert sum(line[0] == "label" for line in lines) >= 8
    assert outline(list(other_numbers(rows))) == lines
    moved = [rows[0], "", *rows[1:-2], rows[-1]]
    assert outline(moved) != lines


def test_what_a_pane_of_free_text_says_is_no_label_of_the_pane_above() -> None:
    rows = committed("run-live-80x24")
    lines = outline(rows)
    step = next(y for y, row in enumerate(rows) if "step 310/900" in row)
    start = rows[step].index("step 310/900")
    rows[step] = f"{rows[step][:start]}step 300  validation loss 5.367422"
    assert outline(rows) == lines


@pytest.mark.parametrize("above", [False, True])
def test_an_outline_is_the_same_without_a_step_that_took_no_time(above: bool) -> None:
    rows = committed("run-out-of-memory-80x24")
    left = [row[:44] for row in rows]
    step = next(y for y, part in enumerate(left) if part.startswith(f" {DONE}"))
    last = next(y for y, part in enumerate(left) if "no loss was logged" in part)
    rest = left[step + 1 : last + 1]
    left[step : last + 1] = ["", *rest] if above else [*rest, ""]
    fewer = [f"{part:44}{row[44:]}" for part, row in zip(left, rows, strict=True)]
    assert fewer != rows
    assert outline(fewer) == outline(rows)
    unlogged = [row.replace("no loss was logged", " " * 18) for row in rows]
    assert outline(unlogged) != outline(rows)


@pytest.mark.slow
@pytest.mark.parametrize("story", PICTURES)
def test_a_story_shows_what_its_pictures_show_but_for_numbers(story: str, tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "make.py", "--into", tmp_path, story]
    subprocess.run(command, check=True, capture_output=True, timeout=1500)
    for name in PICTURES[story]:
        seen = outline(rows_of((tmp_path / f"{name}.svg").read_text(encoding="utf-8")))
        differing = sorted(map(str, seen ^ outline(committed(name))))
        assert not differing, f"{name} is stale: python screenshots/make.py {story}: {differing}"


@pytest.mark.parametrize("name", SCENES)
async def test_a_scene_shows_what_its_pictures_show(name: str) -> None:
    app = console(SCENES[name])
    async with app.run_test(size=SIZES[-1]) as pilot:
        await play(SCENES[name], app, pilot)
        for size in reversed(SIZES):
            # Pictures are made at their size from the start. A screen that shrinks looks the same. One that grows need not:
            # a list that has scrolled stays where it is.
            await pilot.resize_terminal(*size)
            await settle(app, pilot)
            stale = f"{name} is stale: python screenshots/make.py {name}"
            assert rows_of(svg_of(app)) == committed(name_of(name, size)), stale


def test_a_picture_is_read_back_as_its_screen_was() -> None:
    rows = committed("devices-8-gpus-80x24")
    assert len(rows) == 24
    assert rows[0].startswith(" memconsole  devices")
    assert any(re.search(r"power n/a — .*\[NVML 999\]", row) for row in rows)


def test_every_picture_of_the_pages_exists_and_they_lead_to_every_picture() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {n for page in pages for n in PICTURE.findall(page.read_text(encoding="utf-8"))}
    assert not sorted(name for name in named if not (FOLDER / name).is_file())
    kept = {path.name for suffix in ("png", "svg") for path in FOLDER.glob(f"*.{suffix}")}
    assert {path.stem for path in map(Path, kept)} == {path.stem for path in map(Path, named)}
    shown = {path.name for path in FOLDER.glob("*.png")}
    assert shown == {name for name in named if name.endswith(".png")}
    assert shown == {f"{name}.png" for name in SHOWN}


def test_every_picture_has_a_scene_or_a_story_that_makes_it() -> None:
    made = {name_of(name, size) for name in SCENES for size in SIZES}
    told = {name for pictures in PICTURES.values() for name in pictures}
    assert {path.stem for path in FOLDER.glob("*.svg")} == made | told
