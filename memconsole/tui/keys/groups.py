"""The key table as the help shows it: the rows of each screen, grouped by purpose."""

from __future__ import annotations

from typing import NamedTuple

from memconsole.tui.keys.rows import MAIN, MODAL, Key
from memconsole.tui.keys.table import KeyTable

TITLES = {
    "plan": "plan screen",
    "run": "run screen",
    "runs": "all runs",
    "devices": "devices",
    "pick": "choosing",
    "prompt": "typing",
    "launch": "launching a run",
    "confirm": "before it cannot be undone",
    "help": "help",
    "command": "command line",
    "compare": "runs side by side",
    "plans": "plans side by side",
}
OPTIMIZATIONS, MOVING, GOING = "optimizations: next value of", "moving", "going elsewhere"
_GROUPS = {
    "what is trained": ("model", "data", "device", "backend", "settings", "presets"),
    "making it fit": ("fit", "pin", "largest-batch", "largest-length", "exact"),
    "changing": ("toggle", "forward", "back", "undo", "redo"),
    "files and comparing": ("save", "load", "command", "compare-plans"),
    "launching": ("launch",),
    "the run": ("stop", "pause", "continue", "resume", "remedies", "helps", "edit"),
    "charts": ("next-chart", "previous-chart", "logarithm", "zoom", "glyphs"),
    "lower pane": ("pane", "older-sample", "newer-sample"),
    MOVING: ("up", "down", "page-up", "page-down", "first", "last"),
    GOING: (
        "plan", "training", "runs", "devices", "go-back", "dismiss", "palette", "help", "background", "leave",
        "leave-anywhere",
    ),
    "the console": ("theme", "mouse", "repaint"),
}  # fmt: skip
_GROUP_OF = {id: title for title, ids in _GROUPS.items() for id in ids}
_ORDER = (*_GROUPS, OPTIMIZATIONS)


class Group(NamedTuple):
    """A title and its rows."""

    title: str
    rows: tuple[Key, ...]


def groups_of(keys: KeyTable, screen: str, without: frozenset[tuple[str, str]]) -> list[Group]:
    """The rows of one screen in groups, except those in `without` (id, keys). Rows that no group names
    come first, under the screen's own title."""
    by_title: dict[str, list[Key]] = {}
    for key in keys.rows(screen):
        if (key.id, key.keys) not in without:
            default = OPTIMIZATIONS if key.id.startswith("toggle-") else TITLES[screen]
            by_title.setdefault(_GROUP_OF.get(key.id, default), []).append(key)
    order = sorted(by_title, key=lambda title: _ORDER.index(title) if title in _ORDER else -1)
    return [Group(title, tuple(by_title[title])) for title in order]


def all_groups(keys: KeyTable, current: str) -> list[tuple[str, list[Group]]]:
    """The groups of every screen, `current` first. A row with the same keys on several screens is
    listed once."""
    seen: frozenset[tuple[str, str]] = frozenset()
    by_screen = []
    for screen in (current, *(s for s in (*MAIN, *MODAL) if s != current)):
        groups = groups_of(keys, screen, seen)
        seen |= {(key.id, key.keys) for group in groups for key in group.rows}
        if groups:
            by_screen.append((screen, groups))
    return by_screen
