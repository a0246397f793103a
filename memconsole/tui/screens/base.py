"""What all screens share: title row, notice row, footer, and actions with conditions."""

from __future__ import annotations

import time
from typing import ClassVar, TypeVar, cast

from textual import events
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget

from memconsole.devices.reading import Devices
from memconsole.tui.draw.lines import ROLES, Line, Span, fit, width_of
from memconsole.tui.keys.rows import Key
from memconsole.tui.screens.console import Console
from memconsole.tui.views.run_view import RunView
from memconsole.tui.widgets.key_bar import KeyBar
from memconsole.tui.widgets.notice import Notice
from memconsole.tui.widgets.text_lines import TextLines

SMALLEST = Size(60, 16)
WHEEL_ROWS = 3
HELD_SECONDS = 0.3
"""A held key repeats sooner than this."""
READ_ONLY = "read only: this console only shows"

Part = TypeVar("Part", bound=Widget)


class ConsoleScreen(Screen[object], inherit_bindings=False):
    """A screen named in the key table.

    Subclasses set `SCREEN` and `BINDINGS = bindings(SCREEN)`.
    """

    SCREEN: ClassVar[str] = ""
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"role--{role}" for role in (*ROLES, "cursor")}
    """The style of every role. `Painted` widgets read it here, so it is computed once per
    screen.
    """
    DEFAULT_CSS = """
    ConsoleScreen {
        & > .role--dim { color: $foreground 66%; }
        & > .role--strong { text-style: bold; }
        & > .role--good { color: $success; text-style: bold; }
        & > .role--bad { color: $error; text-style: bold; }
        & > .role--warn { color: $warning; }
        & > .role--accent { color: $accent; text-style: bold; }
        & > .role--key { color: $accent; }
        & > .role--title { color: $secondary; text-style: bold; }
        & > .role--train { color: $primary; }
        & > .role--validation { color: $warning; text-style: bold; }
        & > .role--baseline { color: $foreground 50%; }
        & > .role--tick { color: $warning; text-style: bold; }
        & > .role--part-a { color: $primary; }
        & > .role--part-b { color: $success; }
        & > .role--part-c { color: $warning; }
        & > .role--part-d { color: $secondary; }
        & > .role--cursor { background: $primary 22%; }
    }
    ConsoleScreen:ansi {
        & > .role--dim { color: ansi_default; text-style: dim; }
        & > .role--baseline { color: ansi_default; text-style: dim; }
        & > .role--cursor { background: ansi_default; text-style: reverse; }
    }
    """
    AUTO_FOCUS = ""
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-tiny"),
        (SMALLEST.width, "-narrow"),
        (100, "-wide"),
        (150, "-huge"),
    ]
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-flat"),
        (SMALLEST.height, "-short"),
        (32, "-tall"),
    ]

    @property
    def console(self) -> Console:
        """The app, limited to what a screen may use."""
        return cast(Console, self.app)

    _parts: tuple[Widget, ...] = ()
    """Every widget of this screen except containers, once all are made."""

    @property
    def composed(self) -> bool:
        """Whether all widgets are made, and the screen is not removed."""
        return bool(self._parts) and self.is_attached

    def part(self, kind: type[Part], id: str = "") -> Part:
        """One of the screen's widgets.

        The screen keeps its widgets itself. A search of the tree would fail while the screen is
        being removed, when timers, workers and resizes may still draw. A widget that is not
        mounted only keeps what it is told to show.
        """
        return next(
            widget for widget in self._parts if isinstance(widget, kind) and id in ("", widget.id)
        )

    def compose(self) -> ComposeResult:
        parts = []
        for widget in self._all_widgets():
            parts.append(widget)
            yield widget
        self._parts = tuple(parts)

    def _all_widgets(self) -> ComposeResult:
        yield TextLines(id="title")
        yield from self.compose_body()
        yield Notice(id="notice")
        yield KeyBar(id="keys")
        yield TextLines(id="too-small")

    def compose_body(self) -> ComposeResult:
        """The screen's own widgets, in one container with the id `body`."""
        raise NotImplementedError

    def redraw(self) -> bool:
        """Draw the whole screen, if its widgets are made and it is on top. Returns whether it is.

        All handlers of a screen draw through this method, because events may arrive at any time.
        """
        if not self.composed or not self.is_current:
            return False
        with self.app.batch_update():
            self.draw_body()
            self.refresh_frame()
        return True

    def draw_body(self) -> None:
        """Tell the screen's own widgets what to show. Only `redraw` calls this."""

    def on_mount(self) -> None:
        leave = self.shown_key("leave-anywhere")
        words = f"at least {SMALLEST.width}x{SMALLEST.height} needed · {leave} quits"
        self.part(TextLines, "too-small").show([[Span(words, "warn")]])
        self.redraw()

    def on_screen_resume(self) -> None:
        self.redraw()

    def conditions(self) -> set[str]:
        """The conditions of the key table's `when` that are true."""
        conditions = set()
        if self.console.run_id:
            conditions.add("attached")
        if self.console.came_from:
            conditions.add("came")
        return conditions

    def reasons(self) -> dict[str, str]:
        """For conditions that are not true: why not. A pressed key that needs one shows it."""
        return {}

    def offered_keys(self) -> tuple[Key, ...]:
        """The rows of the key table whose actions are available."""
        keys = self.console.keys
        return keys.offered(self.SCREEN, self.conditions(), readonly=self.console.readonly)

    def why_not(self, name: str) -> str:
        """Why the key `name` does nothing now; empty if it acts, or if this screen has no such key."""
        rows = [key for key in self.console.keys.rows(self.SCREEN) if name in key.names]
        if set(rows) & set(self.offered_keys()):
            return ""
        true, reasons = {"", *self.conditions()}, self.reasons()
        words = [READ_ONLY if key.when in true else reasons.get(key.when, "") for key in rows]
        return next(filter(None, words), "")

    def key_pressed(self, name: str) -> None:
        """Remove the notice, or show why the key does nothing now. The key's action follows."""
        self.notice(self.why_not(name), "warn")

    def typed_early(self, event: events.Key) -> bool:
        """Take a key that arrived before the screen had its focus. Returns whether it is taken."""
        return False

    def shown_key(self, id: str, screen: str = "") -> str:
        """The key of one row of this screen, or of another screen, as it is printed."""
        return self.console.keys.shown(screen or self.SCREEN, id)

    def title_line(self) -> tuple[str, str]:
        """Left and right text of the title row."""
        return self.SCREEN, ""

    def refresh_frame(self) -> None:
        """Draw the title and the footer."""
        if not self.composed or not self.is_current:
            return
        words, note = self.title_line()
        width = max(1, self.size.width)
        line: Line = [Span(" memconsole ", "accent"), Span(f" {words}", "strong")]
        if self.console.readonly:
            line.append(Span("  read only", "warn"))
        note = fit(note, width - width_of(line) - 2)
        space = width - width_of(line) - width_of([Span(note)]) - 1
        line += [Span(" " * max(1, space)), Span(note, "dim")]
        self.part(TextLines, "title").show([line])
        conditions = {"", *self.conditions()}
        self.part(KeyBar).show([k for k in self.offered_keys() if k.footer_when in conditions])

    def on_resize(self) -> None:
        self.redraw()

    async def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        await self._wheel(event, WHEEL_ROWS)

    async def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        await self._wheel(event, -WHEEL_ROWS)

    async def _wheel(self, event: events.MouseEvent, rows: int) -> None:
        """The wheel moves as the arrows do, three rows at once."""
        event.stop()
        if hasattr(self, "action_move"):
            await self.run_action(f"move({rows})")

    def devices_changed(self, devices: Devices) -> None:
        """Called with a new reading of the devices."""

    def run_changed(self, view: RunView) -> None:
        """Called when the watched run or the way it is shown has changed."""

    def notice(self, words: str, role: str = "accent") -> None:
        """Show a notice above the footer until the next key press; empty text removes it."""
        if self.composed:
            self.part(Notice).show(words, role)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether the key table offers this action. Actions it does not know are Textual's own."""
        if self.console.leaving:
            return False
        written = f"{action}({', '.join(map(repr, parameters))})" if parameters else action
        rows = [key for key in self.console.keys.rows(self.SCREEN) if key.action == written]
        if not rows:
            return True
        now = self.offered_keys()
        return any(key in now for key in rows)


class ConsoleModal(ConsoleScreen, inherit_bindings=False):
    """A screen over another one; escape closes it with None."""

    def __init__(self) -> None:
        super().__init__()
        self._pressed = time.monotonic()

    def held(self) -> bool:
        """Whether less than `HELD_SECONDS` have passed since the last call, or since the screen opened: the
        key may be held. A question must not be answered by the key that asks it."""
        before, self._pressed = self._pressed, time.monotonic()
        return self._pressed - before < HELD_SECONDS

    def key_pressed(self, name: str) -> None:
        """Keep the notice: it tells about the list or the text of this screen."""

    def dismiss(self, result: object = None) -> AwaitComplete:
        """Close with `result`, unless this screen is closed already: two keys may arrive together."""
        return super().dismiss(result) if self.is_active else AwaitComplete()

    def action_back(self) -> None:
        self.dismiss(None)
