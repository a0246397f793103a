"""Notes on parts of chats, such as their reasoning, that the plan's template does not write, and on roles that it does
not know."""

from __future__ import annotations

from collections.abc import Collection

from memconsole.plan.data.check_records import first_record
from memconsole.plan.plan import Plan, printable, quote
from memconsole.plan.templates.chat import MAIN_ROLES, PARTS, RecordError
from memconsole.plan.templates.choice import KEY, template_of
from memconsole.plan.toggles.optimization import Note


def unwritten_notes(plan: Plan) -> tuple[Note, ...]:
    """A note on each part of the first chat that the template does not write, and on its roles; empty if the first one
    cannot be read without the trainer. Raises `PlanError`."""
    template = template_of(plan)
    record = first_record(plan) if template is not None and template.chat else None
    if template is None or record is None:
        return ()
    try:
        text = template.render(record)
    except RecordError:
        return ()  # the checks of the plan say why
    whose = "the first record has"
    sentences = [unwritten_words(plan, whose, part) for part in text.unwritten]
    for names, written in ((text.unwritten_roles, False), (text.unknown_roles, True)):
        sentences += [role_words(plan, whose, names, written)] if names else []
    return tuple(Note(KEY, words) for words in sentences)


def unwritten_words(plan: Plan, whose: str, part: str) -> str:
    """One sentence on a part of chats that the template leaves out. `whose` says which records have it."""
    fields = ", ".join(PARTS[part])
    listed = "" if fields == part else f" ({fields})"
    return (
        f"{KEY} = {quote(plan.data.template)}: {whose} {part}{listed} that the template leaves out"
    )


def role_words(plan: Plan, whose: str, names: Collection[str], written: bool) -> str:
    """One sentence on messages of roles that the template leaves out, or does not know. `whose` says which records have
    them."""
    listed = printable(", ".join(sorted(names)))
    does = (
        f"does not know and writes as they are; expected {', '.join(MAIN_ROLES)}, tool"
        if written
        else "leaves out"
    )
    return (
        f"{KEY} = {quote(plan.data.template)}: {whose} messages of {'roles' if len(names) > 1 else 'role'} {listed} "
        f"that the template {does}"
    )
