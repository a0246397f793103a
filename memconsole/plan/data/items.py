"""A note on a recommender that is priced before its items are counted."""

from __future__ import annotations

from memconsole.plan import catalog
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimization import Note


def item_notes(plan: Plan) -> tuple[Note, ...]:
    """A note if the number of items is assumed. Raises `PlanError`."""
    items = catalog.assumed_items(plan)
    if items is None:
        return ()
    when = "until the data are counted" if catalog.ratings_to_count(plan) else "without the data"
    return (Note("model.items", f"model.items: {items:,} are assumed {when}"),)
