"""The row that sets what a CPU's heap does with freed memory."""

from __future__ import annotations

from typing import Any

from memconsole.plan.machine import jemalloc
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimization import (
    Optimization,
    Reach,
    RemedyRule,
    Result,
    always,
    fixed,
    unchanged,
)

INSTALL = "no libjemalloc.so.2 on this machine (Debian, Ubuntu: apt install libjemalloc2)"


def _elsewhere(plan: Plan, kind: str) -> str | None:
    if kind == "cpu":
        return None
    return "tensors are on another device, whose memory the framework's own allocator holds"


def _needs_library(plan: Plan) -> str | None:
    if plan.optimize.heap != "jemalloc" or jemalloc.library():
        return None
    return f"{INSTALL}; set optimize.heap = fast or tight"


def _log_line(plan: Plan, kind: str) -> str | None:
    if kind != "cpu":
        return None
    return {
        "fast": "Heap: keeps freed memory for the next step",
        "jemalloc": "Heap: jemalloc keeps freed memory, closely packed, for the next step",
        "tight": "Heap: gives freed memory back to the system at once",
    }[plan.optimize.heap]


def _without_library(plan: Plan) -> tuple[Any, ...]:
    return ("jemalloc", "tight") if jemalloc.library() else ("tight",)


HEAP = Optimization(
    key="optimize.heap",
    keyboard="M",
    label="heap of a CPU run",
    short="heap",
    help="fast keeps freed memory for the next step; jemalloc (a library) packs it closely; tight gives it back at once",
    costs="tight: steps take longer, because the system clears each page before it is used again",
    values=fixed("fast", "jemalloc", "tight"),
    conflicts={"optimize.heap": _needs_library},
    result=always(Result.SAME),
    reach=Reach.HEAP,
    touches=("runtime",),
    saves_nothing=_elsewhere,
    remedy=RemedyRule(rank=5, values=_without_library),
    says=_log_line,
    evaluating=unchanged,
)
