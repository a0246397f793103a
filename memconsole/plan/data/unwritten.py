"""Notes on parts of chats, such as their reasoning, that the plan's template does not write."""

from __future__ import annotations

from memconsole.plan.data.check_records import first_record
from memconsole.plan.plan import Plan, quote
from memconsole.plan.templates.chat import PARTS, RecordError
from memconsole.plan.templates.choice import KEY, template_of
from memconsole.plan.toggles.optimization import Note


def unwritten_notes(plan: Plan) -> tuple[Note, ...]:
    """A note on each part of the first chat that the template does not write; empty if the first one cannot be read
    without the trainer. Raises `PlanError`."""
    template = template_of(plan)
    record = first_record(plan) if template is not None and template.chat else None
    if template is None or record is None:
        return ()
    try:
        parts = template.render(record).unwritten
    except RecordError:
        return ()  # the checks of the plan say why
    return tuple(Note(KEY, unwritten_words(plan, "the first record has", part)) for part in parts)


def unwritten_words(plan: Plan, whose: str, part: str) -> str:
    """One sentence on a part of chats that the template leaves out. `whose` says which records have it."""
    fields = ", ".join(PARTS[part])
    listed = "" if fields == part else f" ({fields})"
    return (
        f"{KEY} = {quote(plan.data.template)}: {whose} {part}{listed} that the template leaves out"
    )
