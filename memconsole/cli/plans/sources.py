"""The lines of `memconsole plan` about where weights and data come from."""

from __future__ import annotations

from memconsole.plan.check import check_start
from memconsole.plan.data.left_out import left_out
from memconsole.plan.data.mixture import limit_words, parts
from memconsole.plan.data.readable import check_readable
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole.plan.training.origin import origin


def weights_lines(plan: Plan, kind: str) -> list[str]:
    """Where the first weights come from, and why `train` would refuse the plan."""
    refused = refusal(plan, kind)
    return [origin(plan).words, *([f"train refuses this plan: {refused}"] if refused else [])]


def refusal(plan: Plan, kind: str) -> str | None:
    """Why `train` would refuse the plan on a kind of device, or None."""
    try:
        check_trainable(plan, kind)
        check_start(plan)
        check_readable(plan)
    except PlanError as error:
        return str(error)
    return None


def source_lines(plan: Plan) -> list[str]:
    """The shares of a mixture, the data to validate on, and what folders and a limit leave out; nothing if there is none
    of these."""
    mixed, files = parts(plan), [f"data {words}" for words in left_out(plan)]
    limit = limit_words(plan)
    if len(mixed) == 1 and plan.data.validation is None and not limit:
        return files
    words = [f"{part.share:.1%} {part.plan.data.source}" for part in mixed]
    words[0] += limit
    trained = ", ".join(words) if len(words) > 1 else plan.data.source + limit
    held = f"; validated on {plan.data.validation}" if plan.data.validation else ""
    return [f"data {trained}{held}", *files]
