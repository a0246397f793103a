"""The plan of a job as its node trains it: with the device's name there, and checked before it is submitted."""

from __future__ import annotations

import re
import shlex

from memconsole.plan import catalog
from memconsole.plan.check import device_kind
from memconsole.plan.plan import Plan, PlanError, quote, replace
from memconsole.plan.processes import nodes

_TIME = re.compile(r"\d{1,7}|(\d{1,3}-)?\d{1,5}:\d{1,2}(:\d{1,2})?|\d{1,3}-\d{1,2}")
_PARTITION = re.compile(r"[A-Za-z0-9_.+-]+(,[A-Za-z0-9_.+-]+)*")
_NAMES = {"gpu": "cuda:0", "rocm": "cuda:0", "apple": "mps", "tpu": "tpu"}
EARLY_SECONDS = 60
"""How much longer than `launch.save_seconds` a job must be: Slurm may signal a minute early."""
CHOSEN_HERE = (
    "--output",
    "--open-mode",
    "--signal",
    "--requeue",
    "--no-requeue",
    "--array",
    "--wrap",
)
"""Options of sbatch that only memconsole may set, because it needs them to follow the job."""
SHORT_HERE = ("-o", "-a")


def on_node(plan: Plan) -> Plan:
    """`plan` with a catalog device replaced by the name it has on the machine that has it."""
    name = plan.device.name
    if name not in catalog.devices():
        return plan
    return replace(plan, {"device.name": _NAMES[catalog.catalog_device(name).kind]})


def check_job(plan: Plan) -> None:
    """Raise `PlanError` unless the plan says what a job needs to know."""
    kind = device_kind(plan.device.name)
    if kind != "cpu" and plan.device.name not in catalog.devices():
        raise PlanError(
            f"device.name = {plan.device.name}: launch.on = slurm needs the device of a node: cpu, or one "
            "of the catalog such as h100-80gb",
            "device.name",
        )
    limit, partition = plan.launch.time_limit, plan.launch.partition
    if limit is not None and not _TIME.fullmatch(limit):
        raise PlanError(
            f"launch.time_limit = {quote(limit)}: expected minutes, HH:MM:SS or D-HH:MM:SS",
            "launch.time_limit",
        )
    least = plan.launch.save_seconds + EARLY_SECONDS
    if limit is not None and 0 < _seconds(limit) <= least:  # 0 is no limit
        raise PlanError(
            f"launch.time_limit = {quote(limit)}: the job would save as soon as it starts, because launch.save_seconds = "
            f"{plan.launch.save_seconds:,}; expected more than {least:,} seconds, or a smaller launch.save_seconds",
            "launch.time_limit",
        )
    if partition is not None and not _PARTITION.fullmatch(partition):
        raise PlanError(
            f"launch.partition = {quote(partition)}: expected a name that `sinfo` lists",
            "launch.partition",
        )
    nodes(plan)
    sbatch_options(plan)


def _seconds(limit: str) -> int:
    """The seconds of a time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(word) for word in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def sbatch_options(plan: Plan) -> list[str]:
    """The words of `launch.options`. Raises `PlanError`."""
    key, text = "launch.options", plan.launch.options or ""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PlanError(f"{key} = {quote(text)}: {error}", key) from None
    if words and not words[0].startswith("-"):
        raise PlanError(
            f"{key} = {quote(text)}: expected options of sbatch, such as --account=physics --mem=64G",
            key,
        )
    for word in words:
        name = word.partition("=")[0]
        if name in CHOSEN_HERE or (word.startswith(SHORT_HERE) and not word.startswith("--")):
            raise PlanError(
                f"{key} = {quote(text)}: {name} belongs to memconsole, which needs it to follow the job",
                key,
            )
    return words
