"""A console's screen as SVG and PNG, and the text of such an SVG."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memconsole.tui.app.console import ConsoleApp

FOLDER = Path(__file__).parent
SIZES = ((80, 24), (100, 30), (160, 48))
FONT = "DejaVu Sans Mono"
_CELL_PIXELS, _ROW_PIXELS, _FIRST_BASELINE = 12.2, 24.4, 20.0
_TEXT = re.compile(r'<text class="[^"]*-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')

_BRAILLE = re.compile("[\u2800-\u28ff]")


def name_of(name: str, size: tuple[int, int]) -> str:
    """A picture's file name without its ending."""
    return f"{name}-{size[0]}x{size[1]}"


async def settle(app: ConsoleApp, pilot: Any) -> None:
    """Wait until nothing is being priced or drawn."""
    for _ in range(200):
        await pilot.pause()
        working = {worker.group for worker in app.workers if not worker.is_finished}
        if not working - {"follow"} and not app.plan_screen.view.stale:
            break
        await pilot.pause(0.02)
    await pilot.pause()


def svg_of(app: ConsoleApp) -> str:
    """The screen as it is now."""
    return app.export_screenshot(title="memconsole")


async def shoot(app: ConsoleApp, pilot: Any, path: Path) -> None:
    """Write the screen as `path` with ``.svg``."""
    await pilot.pause()
    Path(f"{path}.svg").write_text(svg_of(app), encoding="utf-8")
    print(path.name, flush=True)


def write_png(svg: Path, png: Path) -> None:
    """Draw the file `svg` as `png`. Needs `FONT` on the system."""
    import resvg_py

    text = _TEXT.sub(_apart, svg.read_text(encoding="utf-8"))
    drawn = text.replace("Fira Code", FONT).replace("arial", FONT)
    pixels = resvg_py.svg_to_bytes(svg_string=drawn, monospace_family=FONT, font_family=FONT)
    png.write_bytes(bytes(pixels))


def _apart(piece: re.Match[str]) -> str:
    """Braille and letters as texts of their own: resvg draws a text in one font, and few have both."""
    text = html.unescape(piece[3])
    if not (_BRAILLE.search(text) and _BRAILLE.sub("", text).strip()):
        return piece[0]
    head = piece[0][: piece.start(3) - piece.start()]
    found = []
    for part in re.finditer(r"[\u2800-\u28ff]+|[^\u2800-\u28ff]+", text):
        placed = re.sub(
            r' x="[^"]*"', f' x="{float(piece[1]) + part.start() * _CELL_PIXELS:g}"', head
        )
        length = f' textLength="{len(part[0]) * _CELL_PIXELS:g}"'
        found.append(
            re.sub(r' textLength="[^"]*"', length, placed) + html.escape(part[0]) + "</text>"
        )
    return "".join(found)


def rows_of(svg: str) -> list[str]:
    """The text of a picture, row by row, each character in its column."""
    rows: dict[int, str] = {}
    for x, y, text in _texts(svg):
        row, column = round((y - _FIRST_BASELINE) / _ROW_PIXELS), round(x / _CELL_PIXELS)
        rows[row] = rows.get(row, "").ljust(column) + text
    return [rows.get(row, "").rstrip() for row in range(max(rows, default=-1) + 1)]


def _texts(svg: str) -> Iterable[tuple[float, float, str]]:
    """Where each piece of text is, in pixels, and the text, from left to right and top to bottom."""
    found = (
        (float(x), float(y), html.unescape(text).replace("\u00a0", " "))
        for x, y, text in _TEXT.findall(svg)
    )
    return sorted(found, key=lambda piece: (piece[1], piece[0]))
