"""The ranks of a run in words: what one is called, which one is slow, and the speed of each device."""

from __future__ import annotations

from memconsole.plan.plan import Plan
from memconsole.runs.read.state.facts import FactsSoFar
from memconsole.runs.read.state.ranks import slowest


def rank_word(facts: FactsSoFar) -> str:
    """The word for a rank: a process, or a device of a process that has several."""
    started = facts.started
    several = started is not None and started.backend == "jax" and started.device_kind != "cpu"
    return "device" if several else "rank"


def slow_words(facts: FactsSoFar) -> str:
    """``rank 3 is slow: the others wait 18 % of a step for it``; empty if no rank is clearly slower."""
    found = slowest(facts.ranks)
    if found is None or not found.clearly:
        return ""
    return (
        f"{rank_word(facts)} {found.rank} is slow: the others wait {found.words} of a step for it"
    )


def each_per_second(plan: Plan, units_per_second: float | None) -> float | None:
    """The share of one device in a run's speed; None for a run on one device."""
    if units_per_second is None or plan.device.count == 1:
        return None
    return units_per_second / plan.device.count
