"""The numbers of equal micro-batches into which the rows of a step can be split."""

from __future__ import annotations

import math

from memconsole.plan.plan import Plan

FEW = 8
"""Up to this many divisors of the rows, a search tries all of them. Each one multiplies its time."""


def half(rows: int, together: int = 1) -> int:
    """The largest divisor of `rows` up to half of it, which keeps the effective batch equal, and so that `together` rows
    are never parted."""
    groups = rows // together
    return together * next((n for n in range(groups // 2, 0, -1) if groups % n == 0), groups)


def searched_steps(plan: Plan) -> tuple[int, ...]:
    """The numbers that a search tries: every divisor of a device's rows. If there are more than `FEW`: the plan's number,
    and those at which the rows, or the plan's micro-batch, are halved down to one row. If training depends on the number:
    the plan's alone. Rows that belong together count as one."""
    batch, present = plan.train.batch_size // plan.rows_together, plan.optimize.accumulation_steps
    if plan.hybrid.sums_gradients:
        return (present,)
    rows = batch * present
    numbers = _divisors(rows)
    if len(numbers) > FEW:
        numbers = {rows // n for start in (rows, batch) for n in _halved(start)}
    return tuple(sorted(numbers))


def more_steps(plan: Plan) -> tuple[int, ...]:
    """Those numbers with which micro-batches are smaller."""
    return tuple(n for n in searched_steps(plan) if n > plan.optimize.accumulation_steps)


def _divisors(rows: int) -> set[int]:
    small = {n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0}
    return small | {rows // n for n in small}


def _halved(rows: int) -> list[int]:
    """`rows`, and what is left of them after each halving."""
    halved = [rows]
    while halved[-1] > 1:
        halved.append(half(halved[-1]))
    return halved
