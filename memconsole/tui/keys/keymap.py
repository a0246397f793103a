"""The keymap file: which keys the user gives to which rows of the key table.

One TOML table for each screen, and `[all]` for every screen that has the row::

    [plan]
    launch = "L"

    [all]
    help = "?,ctrl+e"

An invalid row is rejected with a one-line reason; the other rows still apply.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_letters, digits

from memconsole import regular_file
from memconsole.plan.plan import nearest
from memconsole.sanitize import clean_line
from memconsole.tui.keys.names import is_text, key_name, printed, written
from memconsole.tui.keys.rows import ALL_SCREENS, EXCLUDING, RESERVED, TYPING, Key, for_screen
from memconsole.tui.keys.table import KeyTable
from memconsole.user_folders import config_folder

ALL = "all"
EDITING = frozenset(
    {"left", "right", "home", "end", "backspace", "delete", "shift+left", "shift+right"}
    | {"ctrl+left", "ctrl+right", "ctrl+shift+left", "ctrl+shift+right", "shift+home", "shift+end"}
    | {"ctrl+shift+a", "ctrl+a", "ctrl+e", "ctrl+d", "ctrl+w", "ctrl+u", "ctrl+k", "ctrl+x"}
    | {"ctrl+v", "ctrl+backspace", "alt+backspace"}
)
"""Keys that edit a line of typed text, besides the keys that type text."""
MOST_BYTES = 64 << 10
_SCREENS = {screen: tuple(key.id for key in for_screen(screen)) for screen in ALL_SCREENS}


@dataclass(frozen=True)
class Keymap:
    """The content of the keymap file at `path`."""

    path: Path
    table: KeyTable = field(default_factory=KeyTable)
    problems: tuple[str, ...] = ()
    """One line for each rejected row: where it is, why it is rejected, what is allowed."""
    there: bool = False
    """Whether the file exists."""

    @property
    def notice(self) -> str:
        """The problems in one line; "" if there are none."""
        count = len(self.problems)
        many = f"{count} rows refused, `memconsole doctor` lists them: " if count > 1 else ""
        return f"{self.path.name}: {many}{self.problems[0]}" if count else ""


@dataclass(frozen=True)
class _Row:
    """One row of the file with valid keys."""

    section: str
    id: str
    keys: tuple[str, ...]

    @property
    def screens(self) -> tuple[str, ...]:
        return tuple(s for s in ALL_SCREENS if self.section in (s, ALL) and self.id in _SCREENS[s])

    def refused(self, why: str) -> str:
        return _refused(self.section, self.id, ",".join(map(written, self.keys)), why)


class _RefusedError(Exception):
    """Why a row is rejected."""


def read_keymap(path: Path | None = None) -> Keymap:
    """The user's keymap; never raises. Without a file, the built-in keys."""
    path = path or config_folder() / "keys.toml"
    try:
        content = regular_file.read(path, MOST_BYTES)
    except FileNotFoundError:
        return Keymap(path)
    except regular_file.TooLargeError:
        words = f"larger than {MOST_BYTES >> 10} KiB"
        return Keymap(path, problems=(words,), there=True)
    except OSError as error:
        return Keymap(path, problems=(f"cannot be read: {error.strerror}",), there=True)
    try:
        table, problems = parse(content.decode())
    except UnicodeDecodeError:
        table, problems = KeyTable(), ("not UTF-8 text",)
    return Keymap(path, table, problems, there=True)


def parse(text: str) -> tuple[KeyTable, tuple[str, ...]]:
    """The keys in the text of a keymap file, and the reason for each rejected row."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        return KeyTable(), (clean_line(f"not TOML: {error}", 300),)
    rows: list[_Row] = []
    problems: list[str] = []
    names = ", ".join(f"[{name}]" for name in (ALL, *ALL_SCREENS))
    for section, given in document.items():
        if not isinstance(given, dict):
            problems.append(
                clean_line(
                    f"{section[:60]}: belongs in the table of a screen; the screens are {names}"
                )
            )
            continue
        if section not in (ALL, *ALL_SCREENS):
            hint = nearest(section, (ALL, *ALL_SCREENS))
            problems.append(
                clean_line(f"[{section[:60]}]: no such screen{hint}; there are {names}")
            )
            continue
        for id, keys in given.items():
            try:
                rows.append(_row(section, id, keys))
            except _RefusedError as refusal:
                problems.append(_refused(section, id, keys, str(refusal)))
    while clash := _first_clash(rows):
        row, why = clash
        rows.remove(row)
        problems.append(row.refused(why))
    return _table(rows), tuple(problems)


def dumps(table: KeyTable) -> str:
    """The keys in use as a keymap file; each row has a comment on what it does."""
    lines = ["# Keys of memconsole. Delete the rows you leave as they are.", ""]
    keys: dict[str, list[str]] = {}
    for screen in ALL_SCREENS:
        for row in table.rows(screen):
            keys.setdefault(row.id, []).append(row.keys)
    everywhere = {id for id, found in keys.items() if len(found) > 1 and len(set(found)) == 1}
    for section in (ALL, *ALL_SCREENS):
        screens = ALL_SCREENS if section == ALL else (section,)
        rows = {
            row.id: row
            for screen in screens
            for row in table.rows(screen)
            if (row.id in everywhere) == (section == ALL)
        }
        if rows:
            lines += [
                f"[{section}]",
                *(_written(id, row.names, row.help) for id, row in rows.items()),
                "",
            ]
    return "\n".join(lines)


def _written(id: str, names: Iterable[str], help: str) -> str:
    bare = all(c in ascii_letters + digits + "-_" for c in id)
    keys = json.dumps(",".join(map(written, names)), ensure_ascii=False)
    return f"{id if bare else json.dumps(id)} = {keys}  # {help}"


def _row(section: str, id: str, keys: object) -> _Row:
    """The row, with its keys by Textual's names. Raises `_RefusedError`."""
    places = tuple(s for s in ALL_SCREENS if id in _SCREENS[s])
    if not places or section not in (ALL, *places):
        known = {i for s, ids in _SCREENS.items() if section in (s, ALL) for i in ids}
        hint = f"; it belongs to {', '.join(places)}" if places else nearest(id, known)
        raise _RefusedError(f"no such row{hint}; `memconsole keys` lists them")
    if not isinstance(keys, str):
        raise _RefusedError('not text: keys are written like "L" or "L,ctrl+e"')
    names: list[str] = []
    for word in keys.split(","):
        name = key_name(word)
        if name is None:
            said = (
                f'"{word.strip()}" is no key' if word.strip() else 'a key is missing (, is "comma")'
            )
            raise _RefusedError(
                f'{said}; keys are one character, "ctrl+e" and the like, "enter", "pageup" …'
            )
        if name in RESERVED:
            raise _RefusedError(
                f"{printed(name)} does not arrive everywhere: terminals, tmux, screen or editors keep"
                " it, as they do f1 … f24 and ctrl+ a b h i j m p s ["
            )
        names.append(name)
    row = _Row(section, id, tuple(dict.fromkeys(names)))
    typing = [screen for screen in row.screens if screen in TYPING]
    taken = next((name for name in row.keys if is_text(name) or name in EDITING), None)
    if typing and taken:
        raise _RefusedError(
            f"{printed(taken)} types or edits text on {' and '.join(typing)}; there only keys such as"
            ' "enter", "escape", "ctrl+n" can be'
        )
    return row


def _refused(section: str, id: str, keys: object, why: str) -> str:
    return clean_line(
        f"[{section}] {id[:60]} = {json.dumps(str(keys)[:40], ensure_ascii=False)}: {why}", 500
    )


def _sources(rows: Sequence[_Row]) -> dict[tuple[str, str], int]:
    """For each screen and row id, which row of the file sets its keys.

    A screen's own table takes precedence over `[all]`.
    """
    sources: dict[tuple[str, str], int] = {}
    for own in (False, True):
        for n, row in enumerate(rows):
            if (row.section != ALL) == own:
                sources |= {(screen, row.id): n for screen in row.screens}
    return sources


def _table(rows: Sequence[_Row]) -> KeyTable:
    sources = _sources(rows).items()
    return KeyTable(tuple((screen, id, ",".join(rows[n].keys)) for (screen, id), n in sources))


def _first_clash(rows: Sequence[_Row]) -> tuple[_Row, str] | None:
    """The first key clash: the row of the file to reject (the later one), and the reason."""
    table = _table(rows)
    clash = next(_clashes(table), None)
    if clash is None:
        return None
    screen, name, *both = clash
    sources = _sources(rows)
    kept, refused = sorted(both, key=lambda row: sources.get((screen, row.id), -1))
    used = {name for row in table.rows(screen) for name in row.names}
    free = " ".join([c for c in ascii_letters + digits if c not in used][:12])
    why = f"{printed(name)} is {kept.id} on the {screen} screen; free are {free}"
    return rows[sources[screen, refused.id]], why


def _clashes(table: KeyTable) -> Iterator[tuple[str, str, Key, Key]]:
    """Each screen, key and two rows that share the key although both can act at the same time."""
    for screen in ALL_SCREENS:
        owners: dict[str, list[Key]] = {}
        for row in table.rows(screen):
            for name in row.names:
                for other in owners.setdefault(name, []):
                    if frozenset({row.when, other.when}) not in EXCLUDING:
                        yield screen, name, other, row
                owners[name].append(row)
