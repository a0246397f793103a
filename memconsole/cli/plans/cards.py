"""How many devices a plan needs, as `memconsole plan` prints it."""

from __future__ import annotations

from typing import Any

from memconsole.cli.tables import columns
from memconsole.memory.answers.cards import Cards, Needed
from memconsole.plan.machine.budget import Budget
from memconsole.units import format_bytes, format_step


def table_lines(priced: tuple[Cards, ...], device: Budget) -> list[str]:
    """A row for each number of devices and way of sharding."""
    if not priced:
        return [f"{device.name} is a single device: there is no table of several devices"]
    rows = [["devices", "sharding", "micro-batch", "each", "between", "step", ""]]
    for cards in priced:
        table, plan = cards.table, cards.plan
        low, high = table.band_bytes
        rows.append(
            [
                f"{cards.count:,}",
                cards.sharding,
                f"{plan.train.batch_size} x {plan.optimize.accumulation_steps}",
                f"{table.device_tier}{format_bytes(table.device_bytes)}",
                f"{format_bytes(low)} and {format_bytes(high)}",
                f"~{format_step(cards.step_seconds)}",
                table.words,
            ]
        )
    usable = f"{format_bytes(device.usable_bytes)} usable each"
    return [f"on several {device.name}, {usable}", *columns(rows, left=(1, 2, 6))]


def cards_document(needs: Needed | None) -> dict[str, Any] | None:
    """The least number of devices; None for a plan that fits as it is."""
    if needs is None:
        return None
    return {
        "words": needs.words,
        "tight_on": needs.tight,
        "found": None if needs.found is None else _document(needs.found),
    }


def table_document(priced: tuple[Cards, ...]) -> list[dict[str, Any]]:
    """The rows of the table. Every byte count is an integer."""
    return [_document(cards) for cards in priced]


def _document(cards: Cards) -> dict[str, Any]:
    plan, table = cards.plan, cards.table
    return {
        "count": cards.count,
        "sharding": cards.sharding,
        "batch_size": plan.train.batch_size,
        "accumulation_steps": plan.optimize.accumulation_steps,
        "effective_batch": plan.effective_batch,
        "device_bytes": table.device_bytes,
        "band_bytes": list(table.band_bytes),
        "tier": str(table.device_tier),
        "verdict": str(table.verdict),
        "step_seconds": cards.step_seconds,
    }
