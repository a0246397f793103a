"""`memconsole fit --exact`: the fit by traced or compiled numbers, asked for only where they decide."""

from __future__ import annotations

import time

import msgspec

from memconsole.cli.exact import wait_for_exact
from memconsole.memory.answers.solve import Fit, Price, fit
from memconsole.memory.estimate import table_of
from memconsole.memory.table import MemoryTable
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.plan.budget import Budget
from memconsole.plan.plan import Plan


def fit_exactly(
    book: ExactBook, plan: Plan, device: Budget, keep: frozenset[str], limit_seconds: float
) -> tuple[Fit, str]:
    """The best plan that fits by exact numbers, and why it is not sure, or nothing.

    Plans known by formula alone are hoped to need the low end of their band. The best of those that may fit is
    traced, until the best is one that is known to fit: no better one was left out but for a formula whose whole
    band lies beyond the budget.
    """
    deadline = time.monotonic() + limit_seconds
    problem = ""
    while True:
        hoped = fit(plan, device, keep, hopeful(book))
        if not hoped.fits or sure(known(book)(hoped.plan, device)):
            break
        problem = wait_for_exact(book, hoped.plan, device, max(0.1, deadline - time.monotonic()))
        if not problem and not sure(known(book)(hoped.plan, device)):
            problem = "the tracer's answer is not for this plan"
        if problem:
            break
    return fit(plan, device, keep, known(book)), problem


def known(book: ExactBook) -> Price:
    """Tables as exact as the book knows them."""
    return lambda plan, device: table_of(plan, device, book.lookup)


def hopeful(book: ExactBook) -> Price:
    """The same, with a formula at the low end of its band."""
    price = known(book)

    def table(plan: Plan, device: Budget) -> MemoryTable:
        found = price(plan, device)
        if sure(found):
            return found
        low = min(found.band_bytes[0], found.device_bytes)
        hoped: MemoryTable = msgspec.structs.replace(found, device_bytes=low)
        return hoped

    return table


def sure(table: MemoryTable) -> bool:
    """Whether it holds what was traced or compiled; some of its phases may still be the formula's."""
    return table.formula is not None
