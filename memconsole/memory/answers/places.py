"""The numbers of devices that a plan may run on, and the part of a step that each device then computes."""

from __future__ import annotations

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.processes import nodes, processes
from memconsole.plan.toggles.optimizations import conflict

COUNT, SHARDING = "device.count", "optimize.sharding"
ROWS = ("train.batch_size", "optimize.accumulation_steps")
SPLIT = ("ddp", "fsdp")


def counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8 … up to `most`, which is one of them."""
    return tuple(sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most}))


def placed(plan: Plan, count: int, sharding: str) -> Plan:
    """`plan` on `count` devices, which share the rows of a step. Each device gets the same number of rows, and rows that
    belong together stay on one device, so a step may have a few rows more.

    Micro-batches keep their size if the rows of a device are a multiple of it, and are smaller otherwise. Where training
    depends on their number, they keep that.
    """
    if count == plan.device.count:
        return plans.replace(plan, {SHARDING: sharding})
    together = plan.rows_together
    rows = _up(plan.effective_batch, count * together) // count
    if plan.hybrid.sums_gradients:
        steps = plan.optimize.accumulation_steps
        batch = _up(rows, steps * together) // steps
    else:
        sizes = range(_up(plan.train.batch_size, together), 0, -together)
        batch = next(size for size in sizes if rows % size == 0)
        steps = rows // batch
    return plans.replace(plan, {COUNT: count, SHARDING: sharding, ROWS[0]: batch, ROWS[1]: steps})


def _up(number: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `number`."""
    return -(-number // unit) * unit


def places(plan: Plan, keep: frozenset[str], most: int | None) -> tuple[Plan, ...]:
    """`plan` on up to `most` devices (None: on its own number), in every way that has the same rows in a step and does not
    change the settings in `keep`."""
    own = plan.device.count
    allowed = (own,) if most is None or COUNT in keep else counts(max(most, 1))
    found = []
    for count in sorted(allowed, key=lambda count: (count != own, count)):
        for sharding in ("none",) if count == 1 else SPLIT:
            other = placed(plan, count, sharding)
            kept = all(plans.get(other, key) == plans.get(plan, key) for key in keep)
            if kept and other.effective_batch == plan.effective_batch and not _unfilled(other):
                found.append(other)
    return tuple(found) or (plan,)


def moves(before: Plan, after: Plan) -> int:
    """How many of two settings differ: the number of devices, and how they share the work (sharding)."""
    return sum(plans.get(before, key) != plans.get(after, key) for key in (COUNT, SHARDING))


def of_place(before: Plan, after: Plan) -> tuple[tuple[str, str], ...]:
    """The settings, with their labels, that a search does not choose, because they follow from the number of devices and
    micro-batches."""
    if before.device.count == after.device.count:
        return ((ROWS[0], "micro-batch"),)
    return (COUNT, "devices"), (ROWS[0], "micro-batch of each")


def refused(plan: Plan) -> str | None:
    """Why a plan cannot be trained in its place, or None."""
    found = conflict(plan)
    return _unfilled(plan) if found is None else found[1]


def _unfilled(plan: Plan) -> str | None:
    """Why the devices do not fill their nodes, or None."""
    try:
        if plan.launch.on == "slurm":
            nodes(plan)
        processes(plan)
    except PlanError as error:
        return str(error)
    return None
