"""Command-line options that several commands have, and the plan that they describe."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memconsole.cli import completing

if TYPE_CHECKING:
    from memconsole.plan.plan import Plan


class Number(click.FloatRange):
    """A number of a range that is neither infinite nor NaN. Of NaN, no comparison with an end of the range is true."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{found} is not a number to compute with.", param, ctx)
        return found


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--preset``, ``--plan``, ``--from`` and ``--set``; see `build_plan`."""
    for option in (
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change a setting.",
            shell_complete=completing.assignments,
        ),
        click.option(
            "--from",
            "source",
            metavar="RUN[@best|@last|@step-N]",
            help="Start from the weights of RUN, with its plan and its tokenizer.",
            shell_complete=completing.run_names,
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


def _known_device(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    """`name` as it is. Raises `PlanError` if no device has it."""
    from memconsole.plan.check import device_kind

    if name is not None:
        device_kind(name)
    return name


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
    callback=_known_device,
    shell_complete=completing.local_devices,
    help="Compute on auto, cpu, cuda:0, mps or tpu. Default: the device of the run.",
)


timeout_option = click.option(
    "--timeout",
    "limit_seconds",
    type=Number(min=0, min_open=True),
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
    source: str | None = None,
    *,
    wait: bool = True,
) -> Plan:
    """The plan a command line describes, checked. `source` names a run whose weights it starts from. With `wait`, what its
    data decide is counted first. Raises `PlanError` and `RunError`."""
    from memconsole.inspection import count_items
    from memconsole.plan import catalog
    from memconsole.plan import plan as plans
    from memconsole.plan.check import check
    from memconsole.plan.data.paths import load
    from memconsole.plan.plan import PlanError

    given = [
        option
        for option, value in (("--preset", preset), ("--plan", plan_file), ("--from", source))
        if value
    ]
    if len(given) > 1:
        raise PlanError(f"{' and '.join(given)} exclude each other: a plan starts from one of them")
    if source is not None:
        from memconsole.cli.from_run import plan_from

        plan = plan_from(source)
    elif preset:
        plan = catalog.preset(preset)
    elif plan_file:
        plan = load(plan_file)
    else:
        plan = catalog.default_plan()
    begun = plan
    for key, value in sorted(plans.parse_assignments(assignments), key=_choices_first):
        plan = catalog.choose(plan, key, value)
    if given and (words := catalog.dropped(begun, plan)):
        click.echo(f"memconsole: {words}; --set keeps it", err=True)
    check(plan)
    if wait:
        with contextlib.suppress(PlanError):  # the trainer says why the data cannot be read
            count_items(plan)
        check(plan)
    return plan


def _choices_first(assignment: tuple[str, object]) -> bool:
    """Sort key that puts model and dataset first: choosing them must not undo other settings."""
    return assignment[0] not in ("model.name", "data.source")
