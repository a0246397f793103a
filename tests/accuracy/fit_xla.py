"""Fit how many copies of each temporary XLA's plan holds at once, by random descent on the mean error."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import msgspec

from memconsole.memory import coefficients, jax_moments
from memconsole.memory.moments import step_of
from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import Plan

Case = tuple[Architecture, Plan]
UNDER_WEIGHT = 1.4
"""An under-estimate is worse than an over-estimate."""
CAP = 0.4
"""No single plan counts for more than this error."""
ROUNDS = 2500


def fit(cases: Sequence[Case], truths: Sequence[int], seed: int = 1) -> dict[str, Any]:
    """The fields of `coefficients.Overlap` that explain `truths` best, with their source."""
    steps = [step_of(plan, architecture, "cpu") for architecture, plan in cases]
    present = msgspec.structs.asdict(coefficients.xla("cpu"))
    names = [name for name in present if name != "source"]

    def cost(values: dict[str, float]) -> float:
        overlap = coefficients.Overlap(**values, source="")
        with mock.patch.object(jax_moments, "xla", return_value=overlap):
            total = 0.0
            for step, truth in zip(steps, truths, strict=True):
                found = max(
                    m.total
                    for m in jax_moments.moments(step)
                    if m.phase not in ("evaluation", "checkpoint")
                )
                error = found / truth - 1
                total += min(CAP, abs(error)) * (1 if error > 0 else UNDER_WEIGHT)
        return total / len(truths)

    rng = random.Random(seed)
    best = {name: float(present[name]) for name in names}
    lowest, width = cost(best), 0.4
    for round_ in range(ROUNDS):
        name = rng.choice(names)
        changed = {**best, name: max(0.0, best[name] + rng.gauss(0, width))}
        found = cost(changed)
        if found < lowest:
            lowest, best = found, changed
        if round_ % (ROUNDS // 4) == ROUNDS // 4 - 1:
            width /= 2
    source = (
        "fitted by `python tests/accuracy/measure.py xla --write` to XLA's CPU plan of the engine's step "
        f"(compiled.memory_analysis) over {len(cases)} random plans; mean weighted error {lowest:.1%}"
    )
    return {**{name: round(value, 2) for name, value in best.items()}, "source": source}
