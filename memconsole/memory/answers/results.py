"""How a plan that a search found changes the training result."""

from __future__ import annotations

from memconsole.memory.answers.space import FREE, HARM
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimization import Result


def results_changed(given: Plan, found: Plan) -> tuple[Result, ...]:
    """How training with `found` differs in its result from `given`, the least harmful first."""
    changed = {row.result_of(row.value(given), row.value(found)) for row in FREE}
    return tuple(result for result in HARM if result in changed)
