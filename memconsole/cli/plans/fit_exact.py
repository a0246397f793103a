"""`memconsole fit --exact`: fits with traced or compiled numbers, where they matter."""

from __future__ import annotations

import time

import msgspec

from memconsole.cli.plans.exact import wait_for_exact
from memconsole.memory.answers.cards import Price
from memconsole.memory.answers.solve import NOTHING, Allowed, Fit, fit
from memconsole.memory.estimate import table_of
from memconsole.memory.table import MemoryTable
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan


def fit_exactly(
    book: ExactBook,
    plan: Plan,
    device: Budget,
    keep: frozenset[str],
    limit_seconds: float,
    allow: Allowed = NOTHING,
    devices: int | None = None,
    price: Price | None = None,
) -> tuple[Fit, str]:
    """The best plan that fits by exact numbers, and the reason if it is not certain. `price` makes tables with the exact
    numbers in `book`, and by formula for the rest.

    A plan known by formula alone is assumed to need the low end of its band. The best plan that may
    fit is traced, and so on until the best plan is known to fit. A better plan is then skipped only
    if its whole band is beyond the budget.
    """
    deadline = time.monotonic() + limit_seconds
    problem = ""
    price = price or (lambda plan, device: table_of(plan, device, book.lookup))
    while True:
        hoped = fit(plan, device, keep, hopeful(price), allow, devices)
        if not hoped.fits or sure(price(hoped.plan, device)):
            break
        problem = wait_for_exact(book, hoped.plan, device, max(0.1, deadline - time.monotonic()))
        if not problem and not sure(price(hoped.plan, device)):
            problem = "the tracer's answer is not for this plan"
        if problem:
            break
    return fit(plan, device, keep, price, allow, devices), problem


def hopeful(price: Price) -> Price:
    """`price`, but with formula estimates at the low end of their band."""

    def low_price(plan: Plan, device: Budget) -> MemoryTable:
        table = price(plan, device)
        if sure(table):
            return table
        low = min(table.band_bytes[0], table.device_bytes)
        hoped: MemoryTable = msgspec.structs.replace(table, device_bytes=low, band_bytes=(low, low))
        return hoped

    return low_price


def sure(table: MemoryTable) -> bool:
    """Whether the table has traced or compiled numbers; some phases may still use the formula."""
    return table.formula is not None
