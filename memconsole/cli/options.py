"""Command-line options that several commands have, and the plan that they describe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memconsole.cli import completing

if TYPE_CHECKING:
    from memconsole.plan.plan import Plan


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--preset``, ``--plan`` and ``--set``; see `build_plan`."""
    for option in (
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change a setting.",
            shell_complete=completing.assignments,
        ),
        click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan file."),
        click.option(
            "--preset",
            metavar="NAME",
            help="Start from a preset.",
            shell_complete=completing.presets,
        ),
    ):
        command = option(command)
    return command


checkpoint_option = click.option(
    "--checkpoint",
    default="best-or-last",
    metavar="best|last|step-N",
    shell_complete=completing.checkpoints,
    help="Which checkpoint. Default: the best by the task's measure or the validation loss; the last if nothing was evaluated.",
)
device_option = click.option(
    "--device",
    metavar="NAME",
    shell_complete=completing.local_devices,
    help="Compute on auto, cpu, cuda:0, mps or tpu. Default: the device of the run.",
)


timeout_option = click.option(
    "--timeout",
    "limit_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="The most that --exact waits.",
)
lengths_option = click.option(
    "--lengths", is_flag=True, help="Measure how many tokens documents hold."
)


def build_plan(
    preset: str | None,
    plan_file: Path | None,
    assignments: tuple[str, ...],
    begun: Plan | None = None,
    *,
    wait: bool = True,
) -> Plan:
    """The plan a command line describes, checked. If `begun` is given, the assignments change that plan. With `wait`, what
    its data decide is counted first. Raises `PlanError`."""
    from memconsole.inspection import count_items
    from memconsole.plan import catalog
    from memconsole.plan import plan as plans
    from memconsole.plan.check import check
    from memconsole.plan.paths import load
    from memconsole.plan.plan import PlanError

    if preset and plan_file:
        raise PlanError("--preset and --plan exclude each other: a plan starts from one of them")
    if begun is not None:
        plan = begun
    elif preset:
        plan = catalog.preset(preset)
    elif plan_file:
        plan = load(plan_file)
    else:
        plan = catalog.default_plan()
    for key, value in sorted(plans.parse_assignments(assignments), key=_choices_first):
        plan = catalog.choose(plan, key, value)
    check(plan)
    if wait:
        with contextlib.suppress(PlanError):  # the trainer says why the data cannot be read
            count_items(plan)
        check(plan)
    return plan


def _choices_first(assignment: tuple[str, object]) -> bool:
    """Sort key that puts model and dataset first: choosing them must not undo other settings."""
    return assignment[0] not in ("model.name", "data.source")
