"""The name, the tags and the note that a person gives to a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from memconsole.errors import UserError
from memconsole.runs.record import files
from memconsole.runs.record.redaction import redact, secret_values
from memconsole.sanitize import clean, clean_line

FILE = "labels.json"
NAME_CHARACTERS = 80
TAG_CHARACTERS = 30
MOST_TAGS = 16
NOTE_CHARACTERS = 2000


class LabelError(UserError):
    """A name, tag or note that a run cannot have; the message is one line."""


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `labels.json`, beside `run.json`, which is never rewritten."""

    name: str = ""
    """Replaces the name given at launch; empty if the run was not renamed."""
    tags: tuple[str, ...] = ()
    note: str = ""


def read_labels(folder: Path) -> Labels:
    """The labels of the run in `folder`, without control characters; none if the file is missing
    or damaged."""
    found = files.read_struct(folder / FILE, Labels)
    if found is None:
        return Labels()
    return Labels(
        name=clean_line(found.name, NAME_CHARACTERS),
        tags=tuple(clean_line(tag, TAG_CHARACTERS) for tag in found.tags[:MOST_TAGS]),
        note=clean(found.note[:NOTE_CHARACTERS]),
    )


def rename(folder: Path, name: str, environment: Mapping[str, str]) -> str:
    """Give the run another name and return it. No path changes: a run's folder is its id.

    Raises `LabelError` for an empty name and `OSError`.
    """
    shown = shown_name(name, environment)
    check_not_empty(shown)
    _write(folder, name=shown)
    return shown


def check_not_empty(name: str) -> None:
    """Raise `LabelError` for a name without text."""
    if not name.strip():
        raise LabelError("a name is one line of text; this one is empty")


def tag(
    folder: Path, added: Iterable[str], removed: Iterable[str], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Add and remove tags, and return all of them. Raises `LabelError` and `OSError`."""
    now = read_labels(folder).tags
    gone, new = set(removed), [redact(word, secret_values(environment)) for word in added]
    for word in new:
        if word != clean_line(word, TAG_CHARACTERS) or len(word.split()) != 1 or "," in word:
            raise LabelError(
                f'tag "{clean_line(word, TAG_CHARACTERS)}": expected one word of at most '
                f"{TAG_CHARACTERS} characters without a comma"
            )
    for word in gone - set(now):
        have = ", ".join(now) or "no tags"
        raise LabelError(
            f'no tag "{clean_line(word, TAG_CHARACTERS)}" to remove; the run has {have}'
        )
    tags = tuple(word for word in dict.fromkeys((*now, *new)) if word not in gone)
    if len(tags) > MOST_TAGS:
        raise LabelError(f"{len(tags)} tags: a run has at most {MOST_TAGS}")
    _write(folder, tags=tags)
    return tags


def note(folder: Path, text: str, environment: Mapping[str, str]) -> str:
    """Replace the run's note; an empty text removes it. Raises `LabelError` and `OSError`."""
    shown = clean(redact(text, secret_values(environment))).strip()
    if len(shown) > NOTE_CHARACTERS:
        raise LabelError(
            f"the note has {len(shown):,} characters; expected at most {NOTE_CHARACTERS:,}"
        )
    _write(folder, note=shown)
    return shown


def shown_name(name: str, environment: Mapping[str, str]) -> str:
    """`name` as it is kept: one short line, without tokens and passwords."""
    return clean_line(redact(name, secret_values(environment)), NAME_CHARACTERS).strip()


def _write(folder: Path, **changes: object) -> None:
    files.write_struct(folder / FILE, msgspec.structs.replace(read_labels(folder), **changes))
