"""What to change in a plan that does not fit, and the largest batch or sequence that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from memconsole.memory.answers.correction import Correction, Died, correction
from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.seconds import seconds_per_unit
from memconsole.memory.table import MemoryTable
from memconsole.plan import plan as plans
from memconsole.plan.budget import Budget
from memconsole.plan.check import check
from memconsole.plan.optimizations import BY_KEY
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.sections import EIGHT_BIT

ORDER = (
    "data.streaming",
    "optimize.accumulation_steps",
    "optimize.precision",
    "optimize.optimizer",
    "optimize.fused_loss",
    "optimize.gradient_checkpointing",
    "data.sequence_length",
    "model.target_params",
    "data.max_examples",
)
"""What costs the result least comes first."""

LARGEST_BATCH = 65_536
CHUNK_TOKENS = 1024
"""No backend makes the logits of more tokens at a time under a chunked loss."""
SCORES_SLACK = 256 * 2**20
"""Bytes by which chunks of attention scores can shrink where a micro-batch grows by a row: eight times what
one chunk of them takes at most."""


Price = Callable[[Plan, Budget], MemoryTable]


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """One change to a plan that lowers its memory."""

    changes: dict[str, Any]
    """Settings for `memconsole.plan.plan.replace`."""
    label: str
    saves_bytes: int
    """Device bytes; on a CPU, where data shares the device's memory, host bytes."""
    fits: bool
    """Whether this change alone makes the plan fit."""
    time_factor: float


def remedies(plan: Plan, budget: Budget, died: Died | None = None) -> tuple[Remedy, ...]:
    """Everything that lowers this plan's memory and that its backend can train, in the order to try.

    With what a run of the plan measured that ran out of memory, in bytes of that run.
    """
    before = table_of(plan, budget)
    by = correction(before, died)
    fits = died is None and by.fits(before)
    found: list[Remedy] = []
    for key in ORDER:
        best = [r for c, label in _changes(plan, key) if (r := _remedy(plan, before, by, c, label))]
        fitting = [r for r in best if r.fits]
        if fitting and not fits:
            found.append(min(fitting, key=lambda r: r.saves_bytes))
        elif best:
            found.append(max(best, key=lambda r: r.saves_bytes))
    return tuple(found)


def _changes(plan: Plan, key: str) -> list[tuple[dict[str, Any], str]]:
    """The ways one remedy can be taken, as settings and a label."""
    if key == "model.target_params":
        size = plan.model.target_params
        return [
            ({key: max(100_000, size // n)}, f"a model of {max(100_000, size // n):,} parameters")
            for n in (2, 4, 8)
        ] if size else []  # fmt: skip
    if key == "data.max_examples":
        limit = plan.data.max_examples
        if plan.data.streaming:
            return []
        return [
            ({key: n}, f"only {n:,} documents") for n in (50_000, 10_000) if not limit or n < limit
        ]
    row = BY_KEY[key]
    present = row.value(plan)
    values = [v for v in row.values(plan) if v != present and row.refusal(plan, v) is None]
    if key == "data.sequence_length":
        values = [v for v in values if v < present]
    if key == "optimize.accumulation_steps":
        values = [v for v in values if v > present]
    if key == "optimize.optimizer":
        values = [v for v in values if v in (*EIGHT_BIT, "adafactor")]
    found = []
    for value in values:
        changes = row.changes(plan, value) if row.changes else {key: value}
        found.append((changes, f"{row.label}: {value}"))
    return found


def _remedy(
    plan: Plan, before: MemoryTable, by: Correction, changes: dict[str, Any], label: str
) -> Remedy | None:
    budget = before.budget
    try:
        changed = plans.replace(plan, changes)
        check(changed)
        after = table_of(changed, budget)
    except PlanError:
        return None
    saves = by.device_bytes(before) - by.device_bytes(after)
    if saves <= 0 and budget.kind == "cpu":
        saves = before.host_bytes - after.host_bytes
    if saves <= 0:
        return None
    now = seconds_per_unit(plan, model_of(plan), budget)
    then = seconds_per_unit(changed, model_of(changed), budget)
    return Remedy(
        changes=changes, label=label, saves_bytes=saves, fits=by.fits(after), time_factor=then / now
    )


def largest_micro_batch(plan: Plan, budget: Budget, price: Price = table_of) -> int | None:
    """The most rows per micro-batch that fit, other settings as they are; None where no number does."""
    sizes = range(1, LARGEST_BATCH + 1)
    return _largest(plan, budget, "train.batch_size", sizes, _least_beyond_batch, price)


def largest_sequence_length(plan: Plan, budget: Budget, price: Price = table_of) -> int | None:
    """The longest rows, in multiples of 8 tokens, that fit and that the model has positions for; None where
    no length does. Rows are no shorter than `data.stride`."""
    shortest = -(-max(8, plan.data.stride or 8) // 8) * 8
    sizes = range(shortest, model_of(plan).max_positions + 1, 8)
    return _largest(plan, budget, "data.sequence_length", sizes, _least_beyond_length, price)


def _least_beyond_batch(table: MemoryTable, plan: Plan) -> int:
    """No larger micro-batch than the plan's needs less than this, though memory is not monotone in it.

    Logits and scores made in equal chunks shrink by one part in (number of chunks + 1) at most where one
    chunk more is begun; at least half always stays.
    """
    chunks = plan.micro_batch_tokens // CHUNK_TOKENS
    bytes_ = table.device_bytes
    return max(bytes_ // 2, bytes_ * chunks // (chunks + 1) - SCORES_SLACK)


def _least_beyond_length(table: MemoryTable, plan: Plan) -> int:
    """The same for longer rows, where padded masks come and go besides."""
    return table.device_bytes // 2


def _largest(
    plan: Plan,
    budget: Budget,
    key: str,
    sizes: range,
    least_beyond: Callable[[MemoryTable, Plan], int],
    price: Price,
) -> int | None:
    """The largest of `sizes` that fits: bisection finds a size beyond which nothing can, and from there every
    size is tried downwards."""

    def priced(size: int) -> tuple[MemoryTable, Plan]:
        changed = plans.replace(plan, {key: size})
        return price(changed, budget), changed

    if not sizes:
        return None
    low, high = 0, len(sizes)  # sizes[high:] cannot fit
    while high - low > 1:
        middle = (low + high) // 2
        if least_beyond(*priced(sizes[middle])) > budget.usable_bytes:
            high = middle
        else:
            low = middle
    for size in reversed(sizes[:high]):
        if priced(size)[0].fits:
            return size
    return None
