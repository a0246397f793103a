"""How many nodes and processes a plan's devices are spread over."""

from __future__ import annotations

from memconsole.plan.plan import Plan, PlanError


def nodes(plan: Plan) -> int:
    """How many nodes the plan's devices take. Raises `PlanError` if they do not fill them."""
    count, each = plan.device.count, plan.launch.devices_per_node
    if each is None or each >= count:
        return 1
    if count % each:
        raise PlanError(
            f"device.count = {count}: expected a multiple of launch.devices_per_node = {each}",
            "device.count",
        )
    return count // each


def processes(plan: Plan) -> int:
    """How many processes train the plan: in torch one for each device, in JAX one for each node.

    On this machine, JAX makes a process for each `launch.devices_per_node` devices of a CPU, as nodes
    would. Its other devices belong to one process. Raises `PlanError` as `nodes`.
    """
    if plan.backend == "torch":
        return plan.device.count
    return nodes(plan) if _is_process_per_node(plan) else 1


def devices_of_each(plan: Plan) -> int:
    """How many devices each of these processes has."""
    count, each = plan.device.count, plan.launch.devices_per_node
    if plan.backend == "torch":
        return 1
    return min(count, each) if each and _is_process_per_node(plan) else count


def _is_process_per_node(plan: Plan) -> bool:
    return plan.launch.on == "slurm" or plan.device.name == "cpu"
