"""How much host memory a job asks for."""

from __future__ import annotations

import re

from memconsole.plan.jobs.on_node import sbatch_options
from memconsole.plan.plan import Plan, PlanError, quote
from memconsole.plan.processes import nodes, processes
from memconsole.units import format_bytes

GIB = 1 << 30
LEAST_GIB = 4
"""GiB that a node is asked for at least: torch's compiler starts processes of 100 to 160 MiB, one for each core."""
_ASKS = frozenset({"--mem", "--mem-per-cpu", "--mem-per-gpu", "--exclusive"})
"""Options of sbatch that say how much memory a job has."""
_AMOUNT = re.compile(r"(\d{1,12})([KMGT]?)B?", re.IGNORECASE)
_UNITS = {"K": 1 << 10, "": 1 << 20, "M": 1 << 20, "G": GIB, "T": 1 << 40}


def asked_gib(plan: Plan, host_bytes: int, least_gib: int = LEAST_GIB) -> int:
    """GiB for a node: one and a half times the estimate, at least `least_gib`. `host_bytes` is that of one process."""
    return max(least_gib, -(-_of_node(plan, host_bytes) * 3 // (2 * GIB)))


def memory_options(plan: Plan, host_bytes: int) -> list[str]:
    """The options of sbatch that ask for a node's memory; none if `launch.options` says how much.

    Raises `PlanError` if that is less than the estimate.
    """
    words = sbatch_options(plan)
    names = [word.partition("=")[0] for word in words]
    if _ASKS.isdisjoint(names):
        return [f"--mem={asked_gib(plan, host_bytes)}G"]
    if "--mem" in names:
        place = names.index("--mem")
        given = words[place].partition("=")[2] or "".join(words[place + 1 : place + 2])
        least = _of_node(plan, host_bytes)
        if 0 < _bytes(given) < least:  # 0 is all memory of the node
            raise PlanError(
                f"launch.options = {quote(plan.launch.options)}: --mem={given} is less than the {format_bytes(least)} "
                "of host memory that are estimated",
                "launch.options",
            )
    return []


def _of_node(plan: Plan, host_bytes: int) -> int:
    return host_bytes * (processes(plan) // nodes(plan))


def _bytes(amount: str) -> int:
    """The bytes of an amount as Slurm reads it; 0 for what it does not read."""
    found = _AMOUNT.fullmatch(amount)
    return int(found[1]) * _UNITS[found[2].upper()] if found else 0
