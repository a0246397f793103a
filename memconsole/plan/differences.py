"""The settings in which plans differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan


def differing(compared: Sequence[Plan]) -> dict[str, tuple[Any, ...]]:
    """Setting → its value in each plan, for the settings that are not the same in all of them."""
    values_by_key = {}
    for key in plans.SETTINGS:
        values = tuple(plans.get(plan, key) for plan in compared)
        if any(value != values[0] or type(value) is not type(values[0]) for value in values):
            values_by_key[key] = values
    return values_by_key
