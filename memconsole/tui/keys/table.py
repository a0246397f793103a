"""The keys in use: the rows of every screen, with the keys of the user's keymap file. Immutable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from memconsole.tui.keys.rows import ALL_SCREENS, Key, for_screen


@dataclass(frozen=True)
class KeyTable:
    """The table from which every binding and every printed key is made. `KeyTable()` has the built-in keys."""

    changes: tuple[tuple[str, str, str], ...] = ()
    """Screen, row id and the changed keys, comma separated."""

    @cached_property
    def _rows(self) -> dict[str, tuple[Key, ...]]:
        changed = {(screen, id): keys for screen, id, keys in self.changes}
        return {
            screen: tuple(
                replace(row, keys=keys) if (keys := changed.get((screen, row.id))) else row
                for row in for_screen(screen)
            )
            for screen in ALL_SCREENS
        }

    def rows(self, screen: str) -> tuple[Key, ...]:
        """The rows that act on `screen`, in table order."""
        return self._rows[screen]

    def offered(
        self, screen: str, conditions: Iterable[str], *, readonly: bool = False
    ) -> tuple[Key, ...]:
        """The rows of `screen` whose actions are available."""
        true = frozenset(conditions)
        return tuple(
            key
            for key in self.rows(screen)
            if (not key.when or key.when in true) and not (readonly and key.writes)
        )

    def shown(self, screen: str, id: str) -> str:
        """The key of one row, as it is printed."""
        return next(key.shown for key in self.rows(screen) if key.id == id)

    def toggle_key(self, optimization: str) -> str:
        """The key that steps one optimization, as shown next to it; "" if it has none."""
        wanted = f"toggle-{optimization}"
        return next((key.shown for key in self.rows("plan") if key.id == wanted), "")

    @cached_property
    def toggle_width(self) -> int:
        """The width in cells of the longest key of an optimization."""
        return max(len(k.shown) for k in self.rows("plan") if k.id.startswith("toggle-"))

    def keymap(self) -> dict[str, str]:
        """For Textual: the keys, by binding id, of changed rows and of rows that share a key.

        Textual unbinds every row that has one of the old or new keys, so rows that share a key are
        included.
        """
        changed = {}
        for screen in ALL_SCREENS:
            before = {key.id: key.names for key in for_screen(screen)}
            rows = self.rows(screen)
            touched = [key for key in rows if key.names != before[key.id]]
            names = {name for key in touched for name in (*key.names, *before[key.id])}
            for key in rows:
                if names & {*key.names, *before[key.id]}:
                    changed[f"{screen}.{key.id}"] = key.keys
        return changed
