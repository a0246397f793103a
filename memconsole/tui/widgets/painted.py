"""The base of every live widget: paints lines and sends only the cells that changed.

Textual compares no cells: it sends a dirty widget whole. `Painted` keeps what it drew, compares,
and refreshes the changed span of each changed row.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from memconsole.tui.draw.lines import Line, cleaned


class Painted(Widget):
    """A widget whose content is `draw(width, height)`, a list of lines.

    Subclasses keep their state in plain attributes, change it in one `show(...)` method, and call
    `repaint()` at its end.
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[list[tuple[str, str]]] = []
        self._strips: list[Strip] = []
        self._painted: tuple[int, int] | None = None
        self._restyled = False
        self._styles: dict[str, Style] = {}
        """Styles of the roles drawn so far. Finding a style walks up to the root, so keep them."""

    def draw(self, width: int, height: int) -> list[Line]:
        """The rows to show, at most `height`, each at most `width` cells. Pure in the state."""
        raise NotImplementedError

    @property
    def ascii_only(self) -> bool:
        """Whether only ASCII may be drawn."""
        return bool(getattr(self.app, "ascii_only", False))

    def repaint(self) -> None:
        """Draw again and refresh what changed."""
        if not self.is_attached:
            return
        width, height = self.content_size
        if self._looks_different() or self._painted != (width, height):
            self._painted = None
            self.refresh()
            return
        rows = self._rows(width, height)
        changed: list[Region] = []
        for y, row in enumerate(rows):
            if row != self._lines[y]:
                start, end = _changed_span(self._lines[y], row)
                self._lines[y] = row
                self._strips[y] = self._strip(row, width)
                if end > start:
                    changed.append(Region(start, y, end - start, 1))
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        size = self.content_size
        if self._looks_different() or self._painted != tuple(size):
            self._painted = (size.width, size.height)
            self._lines = self._rows(size.width, size.height)
            self._strips = [self._strip(row, size.width) for row in self._lines]
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(size.width, self._style(""))

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._restyled = True

    def _looks_different(self) -> bool:
        """Whether a style has changed since the last paint. Textual also announces other
        updates.
        """
        if not self._restyled:
            return False
        self._restyled = False
        before, self._styles = self._styles, {}
        for role in before:
            self._style(role)
        return self._styles != before

    def _rows(self, width: int, height: int) -> list[list[tuple[str, str]]]:
        """Exactly `height` rows of cleaned (text, role), each at most `width` cells."""
        if width <= 0 or height <= 0:
            return [[] for _ in range(max(0, height))]
        ascii_only = self.ascii_only
        rows: list[list[tuple[str, str]]] = []
        for line in self.draw(width, height)[:height]:
            row = [(cleaned(text, ascii_only), role) for text, role in line if text]
            rows.append(row)
        rows.extend([] for _ in range(height - len(rows)))
        return rows

    def _strip(self, row: list[tuple[str, str]], width: int) -> Strip:
        segments = [Segment(text, self._style(role)) for text, role in row]
        return Strip(segments).adjust_cell_length(width, self._style("")).crop(0, width)

    def _style(self, role: str) -> Style:
        """This widget's own style with the role's colour and weight, which the screen defines."""
        style = self._styles.get(role)
        if style is None:
            style = self._styles[role] = self._found_style(role) if role else self.rich_style
        return style

    def _found_style(self, role: str) -> Style:
        name, _, where = role.partition("@")
        own = style = self._style("")
        if name:
            role_style = self.screen.get_component_rich_style(f"role--{name}")
            style = style + Style(color=role_style.color, bold=role_style.bold, dim=role_style.dim)
        if where:
            cursor = self.screen.get_component_rich_style("role--cursor")
            if cursor.reverse:
                # Reversing the colours of several roles would give a patchwork.
                return own + Style(bold=style.bold, reverse=True)
            style = style + Style(bgcolor=cursor.bgcolor)
        return style


def _cells(row: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """One item per terminal cell; the second cell of a wide character is empty text."""
    for text, role in row:
        if text.isascii():
            for character in text:
                yield character, role
            continue
        pending = ""
        for character in text:
            size = cell_len(character)
            if size == 0:
                pending += character
                continue
            yield pending + character, role
            pending = ""
            for _ in range(size - 1):
                yield "", role


def _changed_span(old: list[tuple[str, str]], new: list[tuple[str, str]]) -> tuple[int, int]:
    """The half-open range of cells in which two rows differ."""
    before, after = list(_cells(old)), list(_cells(new))
    longest = max(len(before), len(after))
    blank: tuple[str, str] = (" ", "")
    before += [blank] * (longest - len(before))
    after += [blank] * (longest - len(after))
    start = next((x for x in range(longest) if before[x] != after[x]), longest)
    end = longest
    while end > start and before[end - 1] == after[end - 1]:
        end -= 1
    # Never split a wide character, neither an old nor a new one.
    while 0 < start < end and "" in (after[start][0], before[start][0]):
        start -= 1
    while start < end < longest and "" in (after[end][0], before[end][0]):
        end += 1
    return start, end
