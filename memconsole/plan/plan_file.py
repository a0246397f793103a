"""Plan files: reading and writing a plan as TOML or as a nested mapping. Every error is one line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memconsole import regular_file
from memconsole.plan.plan import (
    SECTIONS,
    SETTINGS,
    Plan,
    PlanError,
    get,
    nearest,
    printable,
    quote,
    replace,
)

PLAN_BYTES = 1 << 20
"""A larger file is no plan."""
BY_RECIPE = "by_recipe"
"""The table of a run's plan file with the numbers that the recipe chose, by dotted key."""


def loads(text: str, where: str = "plan") -> Plan:
    """Parse a plan file. Raises `PlanError` naming the key, the value and what is allowed.

    The numbers that the recipe chose for a run are left out: they belong to that run.
    """
    return parse_run(text, where)[0]


def parse_run(text: str, where: str) -> tuple[Plan, dict[str, float]]:
    """The plan of a run's file as it was set, and the numbers that the recipe chose for the settings that
    it leaves open, by key. Raises `PlanError`."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a plain ValueError
        reason = printable(str(error)) if isinstance(error, ValueError) else "nested too deeply"
        raise PlanError(f"{printable(where)}: not valid TOML: {reason}") from None
    numbers = document.pop(BY_RECIPE, {})
    plan = from_document(document, where)
    if not isinstance(numbers, dict):
        raise PlanError(
            f"{printable(where)}: [{BY_RECIPE}] must be a table, not {quote(numbers)}", BY_RECIPE
        )
    try:
        replace(plan, numbers)
    except PlanError as error:
        raise PlanError(f"{printable(where)}: {error}", error.key) from None
    return plan, {key: number for key, number in numbers.items() if get(plan, key) is None}


def from_document(document: Mapping[str, Any], where: str = "plan") -> Plan:
    """A plan from the nested mapping of a TOML or JSON file. Raises `PlanError`."""
    where = printable(where)
    changes: dict[str, Any] = {}
    for name, value in document.items():
        if name in SECTIONS:
            if not isinstance(value, Mapping):
                raise PlanError(f"{where}: [{name}] must be a table, not {quote(value)}", name)
            changes.update({f"{name}.{key}": inner for key, inner in value.items()})
        elif name == "backend":
            changes[name] = value
        else:
            allowed = ("backend", *SECTIONS)
            raise PlanError(
                f"{where}: unknown key {quote(name)}; allowed: {', '.join(allowed)}"
                f"{nearest(name, allowed)}",
                name,
            )
    try:
        return replace(Plan(), changes)
    except PlanError as error:
        raise PlanError(f"{where}: {error}", error.key) from None


def load_run(path: Path) -> tuple[Plan, dict[str, float]]:
    """`parse_run` of a file. Raises `PlanError`, also when the file is empty, which that of a run never is, or
    cannot be read."""
    text = text_of(path)
    if not text.strip():
        raise PlanError(f"{printable(str(path))}: is empty; put it back as it was")
    return parse_run(text, str(path))


def text_of(path: Path) -> str:
    """What a plan file holds; ``~`` is a home directory. Raises `PlanError` if it cannot be read."""
    try:
        return regular_file.read(path.expanduser(), PLAN_BYTES).decode("utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise PlanError(f"{printable(str(path))}: cannot be read: {_reason(error)}") from None


def _reason(error: OSError | ValueError | RuntimeError) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else printable(str(error))


def to_document(plan: Plan, *, full: bool = False) -> dict[str, Any]:
    """The nested mapping of a plan file; only settings that differ from the defaults unless `full`."""
    document: dict[str, Any] = {"backend": plan.backend}
    for key, setting in SETTINGS.items():
        section, _, name = key.rpartition(".")
        value = get(plan, key)
        if section and value is not None and (full or value != setting.default):
            document.setdefault(section, {})[name] = value
    return document


def dumps(plan: Plan, *, full: bool = True) -> str:
    """The plan as TOML; `loads` gives it back."""
    import tomli_w

    return tomli_w.dumps(to_document(plan, full=full))


def dumps_run(plan: Plan, by_recipe: Iterable[str]) -> str:
    """The plan of a run as TOML, with the settings that the recipe chose in a table of their own;
    `parse_run` gives both back."""
    import tomli_w

    numbers = {key: get(plan, key) for key in sorted(by_recipe)}
    document = to_document(replace(plan, dict.fromkeys(numbers)), full=True)
    return tomli_w.dumps({**document, **({BY_RECIPE: numbers} if numbers else {})})
