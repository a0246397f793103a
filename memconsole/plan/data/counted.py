"""What runs counted in their training data, kept so that later plans need not guess."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from memconsole.plan.counts import read_count, write_count
from memconsole.plan.data.lengths import lengths_key
from memconsole.plan.plan import DataChoice, ModelChoice, Plan, PlanError

KNOWN_SECONDS = 5.0
"""Seconds for which a count is used before its file is read again."""
_known: dict[tuple[DataChoice, ModelChoice, str], tuple[float, int | None]] = {}


def counted_tokens(plan: Plan) -> int | None:
    """The rows that a run with the same tokenizer cut `data.source` into, in its present state, times the tokens between
    two of their starts; None if no run has counted them. Damaged files are ignored."""
    return kept_count(plan, _name)


def keep_counted(plan: Plan, tokens: int) -> None:
    """Keep a count, as `counted_tokens` returns it. If the cache cannot be written, later plans go on guessing."""
    keep_count(plan, tokens, _name)


def kept_count(plan: Plan, name: Callable[[Plan], str]) -> int | None:
    """The count that was kept as `name(plan)`; None if there is none. Damaged files are ignored."""
    key, now = (plan.data, plan.model, plan.train.objective), time.monotonic()
    known = _known.get(key)
    if known is None or now - known[0] > KNOWN_SECONDS:
        if len(_known) > 256:
            _known.clear()
        known = _known[key] = (now, _read(plan, name))
    return known[1]


def keep_count(plan: Plan, count: int, name: Callable[[Plan], str]) -> None:
    """Keep a count as `name(plan)`. If the cache cannot be written, later plans go on guessing."""
    try:
        write_count(name(plan), count)
    except (OSError, PlanError):
        return
    _known.clear()


def _read(plan: Plan, name: Callable[[Plan], str]) -> int | None:
    try:
        return read_count(name(plan))
    except PlanError:
        return None


def _name(plan: Plan) -> str:
    words: tuple[object, ...] = (
        "rows",
        lengths_key(plan),
        plan.data.validation,
        plan.data.validation_fraction,
        plan.data.held_out,
    )
    if plan.learns_pairs:  # each answer has a row of its own
        words = (*words, plan.data.sequence_length)
    return hashlib.sha256(repr(words).encode()).hexdigest()
