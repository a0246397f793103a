"""The tables of settings in docs/: they are made from the settings themselves.

    python tests/pages/settings.py [--write]

``--write`` puts them into their pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.plan.plan import SETTINGS, Plan, replace, written
from memconsole.plan.sections.hybrid import MODES
from memconsole.plan.toggles.optimization import Optimization
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS, conflict
from memconsole.tui.keys.names import printed
from tests.bench.trained import into_page, markdown

DOCS = ROOT / "docs"


def optimizations() -> str:
    """Every row of the plan screen's list: how it is set, what it does, and what only JAX refuses."""
    rows = [["name", "setting", "key", "what it does", "what it costs", "in JAX"]]
    rows += [
        [row.label, _setting(row), f"`{printed(row.keyboard)}`", row.help, row.costs, _in_jax(row)]
        for row in OPTIMIZATIONS
    ]
    return markdown(rows, left=6)


def _setting(row: Optimization) -> str:
    """``--set optimize.precision=bf16``, and the other values that are not the plain one."""
    first, *others = _values(row)
    more = f" (or {', '.join(f'`{value}`' for value in others)})" if others else ""
    return f"`--set {row.key}={first}`{more}"


def _values(row: Optimization) -> list[str]:
    others = row.values(Plan())[1:]
    if all(isinstance(value, int) and not isinstance(value, bool) for value in others):
        return ["N"]
    return [written(value) for value in others]


def _in_jax(row: Optimization) -> str:
    """Why JAX refuses values that torch trains; nothing if it trains the same ones."""
    reasons = {}
    for value in row.values(Plan()):
        torch, jax = (_refusal(row, value, backend) for backend in ("torch", "jax"))
        if jax and not torch:
            reasons[written(value)] = jax
    several = len(set(reasons.values())) > 1 or len(reasons) < len(row.values(Plan())) - 1
    words = [f"`{value}`: {why}" if several else why for value, why in reasons.items()]
    words += [why for (backend, _), why in row.absent_on.items() if backend == "jax"]
    return "; ".join(dict.fromkeys(words))


def _refusal(row: Optimization, value: Any, backend: str) -> str | None:
    settings = {"backend": backend, "train.grad_clip": 0.0}  # which one row excludes in torch
    plan = row.apply(replace(Plan(), settings), value)
    found = conflict(plan)
    return row.refusal(plan) or (found and found[1])


def modes() -> str:
    """What each value of `hybrid.mode` sets."""
    names = next(iter(MODES.values())).__struct_fields__
    rows = [["`hybrid.mode`", *(f"`hybrid.{name}`" for name in names)]]
    rows += [
        [mode, *(f"{getattr(found, name):g}" for name in names)] for mode, found in MODES.items()
    ]
    return markdown(rows)


def hybrid() -> str:
    """Every setting of hybrid training."""
    rows = [["setting", "default", "what it is"]]
    rows += [
        [f"`{key}`", written(setting.default), setting.help]
        for key, setting in SETTINGS.items()
        if key.startswith("hybrid.")
    ]
    return markdown(rows, left=3)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("optimizations.md", "settings"): optimizations,
    ("hybrid.md", "modes"): modes,
    ("hybrid.md", "settings"): hybrid,
}
"""By page and marker."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/")
    write = parser.parse_args().write
    for (page, name), make in TABLES.items():
        print(make(), end="\n\n")
        if write:
            into_page(DOCS / page, name, make())


if __name__ == "__main__":
    main()
