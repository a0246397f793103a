"""Asks the data reader about a source, in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.catalog.item_counts import count_name, item_count, keep_item_count
from memconsole.plan.machine.packages import missing_words
from memconsole.plan.plan import Plan, PlanError
from memconsole.sanitize import clean_line


def inspection(source: str, assignments: Sequence[str], *, lengths: bool) -> dict[str, Any]:
    """What `memconsole_trainer.data` reports about a source. Raises `PlanError`."""
    argv = reader(source, assignments, lengths=lengths)
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True)
    return answer(source, done.returncode, done.stdout, done.stderr)


def data_settings(plan: Plan) -> list[str]:
    """The settings of a plan that decide how its data are read."""
    return [
        word
        for word in plans.command_line(plan)
        if word.startswith(("data.", "model.", "train.objective="))
        and not word.startswith("data.source=")
    ]


def uncounted(plan: Plan) -> str | None:
    """The name of the count that a plan waits for: the items of its ratings decide the size of its model. None if it waits
    for none."""
    file = catalog.ratings_to_count(plan)
    if file is None or item_count(file, plan.data) is not None:
        return None
    try:
        return count_name(file, plan.data)
    except OSError:
        return None


def count_items(plan: Plan) -> None:
    """Count the items of a plan's ratings, if it waits for that. Raises `PlanError` if they cannot be read."""
    name = uncounted(plan)
    if name is not None:
        keep_items(name, inspection(plan.data.source, data_settings(plan), lengths=False))


def reader(source: str, assignments: Sequence[str], *, lengths: bool = False) -> list[str]:
    """The command of the reader."""
    argv = [sys.executable, "-P", "-m", "memconsole_trainer.data"]
    return [*argv, *(["--lengths"] if lengths else []), source, *assignments]


def answer(source: str, code: int, out: bytes, errors: bytes) -> dict[str, Any]:
    """What the reader wrote, or why it ended without an answer. Raises `PlanError`."""
    try:
        report: dict[str, Any] = json.loads(out)
    except ValueError:
        last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        why = missing_words() or f"its reader ended with code {code}: {last}"
        raise PlanError(clean_line(f"{source}: {why}")) from None
    if "error" in report:
        raise PlanError(clean_line(report["error"]))
    return report


def keep_items(name: str, report: dict[str, Any]) -> None:
    """Remember the items that the reader counted as `name`. Raises `PlanError` if it counted none."""
    if report.get("items") is None:
        raise PlanError(clean_line(report.get("problem") or "the ratings cannot be counted"))
    keep_item_count(name, report["items"])
