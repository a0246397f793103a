"""The pictures in screenshots/ are what the console shows now, and the README leads to each of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "screenshots"
sys.path.insert(0, str(FOLDER))

from picture import SIZES, name_of, rows_of, settle, svg_of  # noqa: E402
from scenes import SCENES, console, play  # noqa: E402
from stories import PICTURES  # noqa: E402

PICTURE = re.compile(r"screenshots/([\w.-]+\.(?:png|svg))")


def committed(name: str) -> list[str]:
    """The text of a committed picture."""
    return rows_of((FOLDER / f"{name}.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SCENES)
async def test_a_scene_shows_what_its_pictures_show(name: str) -> None:
    app = console(SCENES[name])
    async with app.run_test(size=SIZES[0]) as pilot:
        await play(SCENES[name], app, pilot)
        for size in SIZES:
            # Pictures are made at their size from the start: a resized screen looks the same.
            await pilot.resize_terminal(*size)
            await settle(app, pilot)
            stale = f"{name} is stale: python screenshots/make.py {name}"
            assert rows_of(svg_of(app)) == committed(name_of(name, size)), stale


def test_a_picture_is_read_back_as_its_screen_was() -> None:
    rows = committed("devices-8-gpus-80x24")
    assert len(rows) == 24
    assert rows[0].startswith(" memconsole  devices")
    assert any(re.search(r"power n/a — .*\[NVML 999\]", row) for row in rows)


def test_every_picture_of_the_readme_exists_and_it_leads_to_every_picture() -> None:
    named = set(PICTURE.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert not sorted(name for name in named if not (FOLDER / name).is_file())
    reached = {Path(name).stem for name in named}
    assert {path.stem for path in FOLDER.glob("*.png")} == reached
    assert {path.stem for path in FOLDER.glob("*.svg")} == reached


def test_every_picture_has_a_scene_or_a_story_that_makes_it() -> None:
    made = {name_of(name, size) for name in SCENES for size in SIZES}
    told = {name for pictures in PICTURES.values() for name in pictures}
    assert {path.stem for path in FOLDER.glob("*.svg")} == made | told
