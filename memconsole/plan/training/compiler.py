"""Which runs of torch import its compiler, even if they compile nothing."""

from __future__ import annotations

from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole.plan.tasks.recommendation import RECOMMENDATION


def imports_compiler(plan: Plan) -> bool:
    """Whether a run of `plan` in torch imports the compiler, which takes a second or two and 100 MB.

    torch's own gradient checkpointing, which the recommender uses too, and training on several
    devices need it.
    """
    o = plan.optimize
    recomputes = o.gradient_checkpointing != "none" or task_of(plan) is RECOMMENDATION
    return o.compile or recomputes or plan.device.count > 1
