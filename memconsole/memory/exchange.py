"""How long the devices of a plan take to exchange weights and gradients in a step."""

from __future__ import annotations

from memconsole.memory.state.sizes import sizes
from memconsole.memory.state.step_sizes import trained_group
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan

LINK = {"tpu": 50e9}
"""Bytes per second and direction between two devices of a kind, if the catalog does not know them."""
SLOWEST_LINK = 12e9
"""The same for all other kinds: PCIe 4 x16 through the host at half its peak."""
LINK_SHARE = 0.7
"""The share of a link's rate that collective operations reach over all devices of a machine."""


def exchange_seconds(plan: Plan, model: Model, budget: Budget) -> float:
    """Seconds that are spent on the link between the devices of one machine, as if nothing else ran meanwhile.

    A ring of n devices sends (n - 1) / n of an array for each gathering or summing of shards, and twice that for a sum
    that all devices get (Patarasuk and Yuan 2009). Processes of one CPU exchange through its memory, which takes
    little time compared with their arithmetic.
    """
    o, count = plan.optimize, plan.device.count
    if count == 1 or o.sharding == "none" or budget.kind == "cpu":
        return 0.0
    gradients = 4 * trained_group(plan, model).elements
    if o.sharding == "ddp":
        sent = 2 * gradients
    else:  # Weights are gathered for the forward and for the backward pass of each micro-batch.
        weights = (4 if o.precision == "fp32" else 2) * sizes(model).total
        sent = o.accumulation_steps * (2 * weights + gradients)
    link = budget.link_bytes_per_second or LINK.get(budget.kind, SLOWEST_LINK)
    return sent * (count - 1) / count / (link * LINK_SHARE)


def devices_at_once(plan: Plan, budget: Budget) -> int:
    """How many devices' worth of arithmetic the plan's devices do at once. Processes of one CPU share its cores."""
    return 1 if budget.kind == "cpu" else plan.device.count
