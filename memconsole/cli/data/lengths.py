"""Document lengths on the command line: measures them on request, and prices known ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from memconsole import typed_json
from memconsole.inspection import data_settings, inspection
from memconsole.memory.answers.cards import Price
from memconsole.memory.answers.lengths import (
    LengthPrice,
    keep_lengths,
    known_lengths,
    priced_lengths,
)
from memconsole.memory.estimate import model_of, table_of
from memconsole.plan.data.lengths import Lengths
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.tasks import task_of
from memconsole.units import format_bytes

_HELD = {
    "p50": "half of the documents",
    "p99": "99 % of the documents",
    "longest": "the longest document",
}


class RowLengths(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the lengths of a plan's documents."""

    lengths: Lengths | None
    prices: tuple[LengthPrice, ...]


def row_lengths(
    plan: Plan, device: Budget, *, measure: bool, price: Price = table_of
) -> RowLengths:
    """Lengths from the last measurement of this data, or from a new one. Raises `PlanError`."""
    lengths = _measured(plan) if measure else known_lengths(plan)
    prices = priced_lengths(plan, device, lengths, price) if lengths is not None else ()
    return RowLengths(lengths=lengths, prices=prices)


def _measured(plan: Plan) -> Lengths:
    task = task_of(plan)
    if task.files:
        raise PlanError(
            f"{plan.data.source}: holds {task.units}; only documents of text have lengths to measure"
        )
    report = inspection(plan.data.source, data_settings(plan), lengths=True)
    if not report.get("lengths"):
        reason = report.get("lengths_problem") or report.get("problem") or "nothing to measure"
        raise PlanError(f"{plan.data.source}: {reason}")
    lengths: Lengths = typed_json.convert(report["lengths"], Lengths)
    keep_lengths(plan, lengths)
    return lengths


def lengths_words(lengths: Lengths) -> str:
    """``p50 312, p99 2,011, longest 9,120 (all 128 documents; …)``."""
    if lengths.kind == "rows":
        return f"every row of the file holds {lengths.longest:,} tokens"
    which = f"{'all' if lengths.exact else 'a sample of'} {lengths.documents:,} documents"
    if lengths.exact and lengths.documents == 1:
        which = "the only document"
    return (
        f"p50 {lengths.p50:,}, p99 {lengths.p99:,}, longest {lengths.longest:,} "
        f"({which}; tokenizer: {lengths.tokenizer})"
    )


def lines(plan: Plan, rows: RowLengths) -> list[str]:
    """What decides a row's length, and the memory for rows that hold a whole document."""
    length = plan.data.sequence_length
    alike = f"every row is {length:,} {task_of(plan).positions}, so that no batch needs more than another"
    if task_of(plan).files:
        return [alike]
    facts = [f"{alike}: {_why(plan, rows)}"]
    if rows.lengths is None:
        return [*facts, "documents' own lengths are not known; --lengths measures them"]
    facts.append(f"tokens per document: {lengths_words(rows.lengths)}")
    if rows.lengths.kind == "rows":
        return facts
    return facts + [f"  {_price_words(plan, price)}" for price in rows.prices]


def _price_words(plan: Plan, price: LengthPrice) -> str:
    holds = f"a row long enough for {_HELD[price.name]} has {price.sequence_length:,} tokens"
    table = price.table
    if table is None:
        return f"{holds}; this model takes at most {model_of(plan).max_positions:,}"
    return f"{holds}: {table.device_tier}{format_bytes(table.device_bytes)}, {table.verdict}"


def _why(plan: Plan, rows: RowLengths) -> str:
    if rows.lengths is not None and rows.lengths.kind == "rows":
        return "the file's rows are cut to that"
    if plan.learns_pairs:
        return "each row holds a prompt with one answer, cut or padded to that"
    if plan.data.template is not None:
        return "records are not split if a row can hold them, and what is left of a row is padded"
    return "documents are packed, the last row padded"


def document(plan: Plan, rows: RowLengths) -> dict[str, Any]:
    """The same as ``plan --json`` and ``fit --json`` print it."""
    return {
        "sequence_length": plan.data.sequence_length,
        "lengths": None if rows.lengths is None else msgspec.to_builtins(rows.lengths),
        "prices": _prices(rows.prices),
    }


def _prices(prices: Sequence[LengthPrice]) -> list[dict[str, Any]]:
    return [
        {
            "name": p.name,
            "tokens": p.tokens,
            "sequence_length": p.sequence_length,
            "tier": None if p.table is None else str(p.table.device_tier),
            "device_bytes": None if p.table is None else p.table.device_bytes,
            "fits": None if p.table is None else p.table.fits,
            "verdict": None if p.table is None else str(p.table.verdict),
        }
        for p in prices
    ]
