"""Names of keys: Textual's, those in the keymap file, and those printed on screen."""

from __future__ import annotations

import unicodedata

_PRINTED = {
    "up": "↑", "down": "↓", "left": "←", "right": "→", "pageup": "PgUp", "pagedown": "PgDn",
    "escape": "esc",
}  # fmt: skip
_WRITTEN = {printed.lower(): name for name, printed in _PRINTED.items()} | {"return": "enter"}
_RENAMED = {
    "solidus": "slash", "reverse_solidus": "backslash", "commercial_at": "at",
    "hyphen_minus": "minus", "plus_sign": "plus", "low_line": "underscore",
}  # fmt: skip
"""Characters for which Textual's name differs from Unicode's."""
NAMED = frozenset(
    {"enter", "escape", "space", "tab", "backspace", "delete", "insert", "home", "end"}
    | {"pageup", "pagedown", "up", "down", "left", "right"}
    | {f"f{n}" for n in range(1, 25)}
)
"""Keys that type no character, and the space bar."""
MODIFIERS = ("alt", "ctrl", "shift")
"""In the order of Textual's names."""


def character_name(character: str) -> str:
    """Textual's name of the key that types `character`."""
    if character.isalnum():
        return character
    name = unicodedata.name(character, character).lower().replace("-", "_").replace(" ", "_")
    return _RENAMED.get(name, name)


_CHARACTERS = {character_name(chr(n)): chr(n) for n in range(33, 127)}


def key_name(written: str) -> str | None:
    """Textual's name of a key written by a user as a name or a character; None if it is no key.

    Letters with ctrl or alt are lower case. A shifted letter is its capital.
    """
    word = written.strip()
    if len(word) == 1 and word not in _WRITTEN:
        return character_name(word) if word.isprintable() else None
    *modifiers, base = word.lower().split("+")
    if not base and word.endswith("++"):
        modifiers, base = modifiers[:-1], "plus"
    base = _WRITTEN.get(base, base)
    if len(base) == 1 and base.isprintable() and not base.isspace():
        base = character_name(base)
    character = len(base) == 1 or base in _CHARACTERS
    if not (character or base in NAMED) or not set(modifiers) <= set(MODIFIERS):
        return None
    if character and "shift" in modifiers:
        only = modifiers == ["shift"] and len(base) == 1 and len(base.upper()) == 1
        return base.upper() if only else None
    return "+".join([*(m for m in MODIFIERS if m in modifiers), base])


def printed(key: str) -> str:
    """A key as the footer and the help print it. `key_name` can read it back."""
    *modifiers, base = key.split("+")
    return "+".join([*modifiers, _PRINTED.get(base) or _CHARACTERS.get(base, base)])


def written(key: str) -> str:
    """A key as it is written in a comma list: a character as itself, any other key by its name."""
    return key if key == "comma" else _CHARACTERS.get(key, key)


def is_text(key: str) -> bool:
    """Whether the key types a character."""
    return len(key) == 1 or key in _CHARACTERS or key == "space"
