"""The row of hybrid training: weights are predicted between phases of training."""

from __future__ import annotations

from collections.abc import Callable

from memconsole.plan.plan import Plan, replace
from memconsole.plan.sections.hybrid import MODES, HybridChoice
from memconsole.plan.toggles.check_hybrid import CONFLICTS
from memconsole.plan.toggles.optimization import (
    HOST_MEMORY,
    Length,
    Optimization,
    Reach,
    RemedyRule,
    Result,
    always,
    fixed,
    switched_off,
)

GUESSED = 1.25
"""A guessed number of steps may be too high by this factor."""
_STATE = {
    "none": "kept",
    "cpu": "on the host",
    "pinned": "on the host, in pinned memory",
    "compress": "in 8 bits",
    "reinitialize": "dropped, then started anew",
}


def _log_line(plan: Plan, kind: str) -> str | None:
    h = plan.hybrid
    if not h.on:
        return None
    n = h.lengths
    return (
        f"Hybrid training ({h.mode}): {n.warmup_steps:,} steps of warmup, then {n.full_steps:,} full steps before "
        f"jumps of at most {n.horizon:,}; optimizer state in predict phases: {_STATE[h.memory]}"
    )


def _at_the_peak(plan: Plan, kind: str) -> str | None:
    if not plan.hybrid.on:
        return None
    held = "the snapshots take memory too" if kind == "cpu" else "snapshots wait in host memory"
    return f"memory falls in predict phases only, the peak is a full step's; {held}"


def _notes(plan: Plan, kind: str, length: Length) -> tuple[str, ...]:
    """A note if the run is too short for any predict phase; otherwise one if predicting needs much memory on a CPU."""
    if not plan.hybrid.on:
        return ()
    return tuple(filter(None, [_too_short(plan, length) or _held(plan, kind)]))


def _too_short(plan: Plan, length: Length) -> str:
    n, steps = plan.hybrid.lengths, length.steps
    first = n.warmup_steps + n.full_steps
    if steps is None or steps > (first if length.known else GUESSED * first):
        return ""
    keys = ["hybrid.warmup_steps"] if n.warmup_steps else []
    if steps <= n.full_steps or not keys:
        keys.append("hybrid.full_steps")
    ends, about = ("ends", "") if length.known else ("may end", "about ")
    return (
        f"this run {ends} before its first predict phase: {first:,} steps come first, the run has "
        f"{about}{steps:,}; shorten {' and '.join(keys)}"
    )


def _held(plan: Plan, kind: str) -> str:
    """What a predict phase on a CPU holds besides the weights, if other settings would hold less."""
    h = plan.hybrid
    copies = h.predict_precision == "bf16" and plan.optimize.precision == "fp32"
    compressed = replace(plan, {"hybrid.memory": "compress"})
    kept = h.memory in ("none", "cpu", "pinned") and CONFLICTS["hybrid.memory"](compressed) is None
    less = [
        (words, setting)
        for applies, words, setting in (
            (copies, "a second copy of the weights", "hybrid.predict_precision = same"),
            (kept, "the optimizer state", "hybrid.memory = compress"),
        )
        if applies
    ]
    if kind != "cpu" or not less:
        return ""
    held, settings = (" and ".join(part) for part in zip(*less, strict=True))
    verb = "hold" if len(less) > 1 else "holds"
    return f"on a CPU a predict phase holds {held}; {settings} {verb} less"


def _of_row(key: str) -> Callable[[Plan], str | None]:
    return lambda plan: CONFLICTS[key](plan) if plan.hybrid.on else None


HYBRID = Optimization(
    key="hybrid.mode",
    more_settings=tuple(f"hybrid.{n}" for n in HybridChoice.__struct_fields__ if n != "mode"),
    keyboard="H",
    label="hybrid training",
    short="hybrid training",
    help="jumps along the weights' path where a batch confirms it; frees memory meanwhile",
    costs="predicted steps train on nothing; in equal time no gain was measured",
    values=fixed("off", *MODES),
    conflicts={key: _of_row(key) for key in CONFLICTS},
    result=always(Result.PREDICTED),
    reach=Reach.NOTHING,
    touches=(HOST_MEMORY,),
    saves_nothing=_at_the_peak,
    remedy=RemedyRule(rank=12, values=fixed("off")),
    notes=_notes,
    says=_log_line,
    evaluating=switched_off({"hybrid.mode": "off"}),
)
