"""`memconsole export-job`: a plan as a job file of SkyPilot or Kubernetes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click

from memconsole.cli import completing
from memconsole.devices.budget import budget
from memconsole.given_path import given_path
from memconsole.inspection import count_items
from memconsole.memory.estimate import estimate
from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.data.paths import anywhere, load
from memconsole.plan.jobs.document import yaml
from memconsole.plan.jobs.host_memory import asked_gib
from memconsole.plan.jobs.installing import check_install
from memconsole.plan.jobs.job import (
    Job,
    check_device,
    job_name,
    with_absent,
    without_absent,
)
from memconsole.plan.jobs.jobset import IMAGE, any_node_words, jobset, node_labels
from memconsole.plan.jobs.skypilot import skypilot
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole.runs.record.directory import RunError
from memconsole.runs.record.files import write_atomic
from memconsole.runs.record.run_store import find_run

LEAST_TO_INSTALL_GIB = 8
"""GiB of host memory that a job asks for at least, because it installs memconsole."""


@click.command()
@click.argument("run_or_plan", shell_complete=completing.runs_or_files)
@click.option(
    "--to",
    "engine",
    required=True,
    type=click.Choice(("skypilot", "jobset")),
    help="For which engine.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this file."
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=completing.assignments,
    help="Change a setting.",
)
@click.option("--name", metavar="TEXT", help="The name of the job and of its run.")
@click.option(
    "--volume",
    metavar="NAME",
    help="A volume, or a claim of one, that keeps the run between machines.",
)
@click.option(
    "--install",
    multiple=True,
    metavar="TEXT",
    help="What the job installs, an argument of pip install: a wheel, a URL, an option of pip. Required.",
)
@click.option(
    "--image",
    metavar="TEXT",
    help=f"The container image (jobset), with bash, Python and pip; by default {IMAGE}.",
)
@click.option(
    "--node-selector",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="A label that the node must have (jobset).",
)
def command(
    run_or_plan: str,
    engine: str,
    output: Path | None,
    assignments: tuple[str, ...],
    name: str | None,
    volume: str | None,
    install: tuple[str, ...],
    image: str | None,
    labels: tuple[str, ...],
) -> None:
    """Write a job file that trains the plan of RUN_OR_PLAN, a run or a plan file.

    The job continues its own run if it is started again.
    """
    plan, title = _plan_of(run_or_plan)
    given = plans.apply_settings(plan, assignments)
    known = without_absent(given)
    with contextlib.suppress(PlanError):  # the data may be where the job runs
        count_items(known)
    check(known)
    check_device(known)
    check_trainable(known)
    known = anywhere(known)
    if not all(c.isprintable() and c not in "'\"" for c in f"{volume}{image}{''.join(install)}"):
        raise PlanError("--volume, --install and --image take text without quotes")
    if engine == "skypilot" and (image or labels):
        raise PlanError(
            "--image and --node-selector are for jobset; SkyPilot looks for a machine with device.name itself"
        )
    check_install(known, install)
    nodes = node_labels(labels)
    host_bytes = estimate(known, budget(known, None)).table.host_bytes or 0
    plan = with_absent(known, given)
    job = Job(
        name=job_name(name or title),
        plan=plan,
        install=install,
        host_gib=asked_gib(plan, host_bytes, LEAST_TO_INSTALL_GIB),
        volume=volume,
    )
    text = yaml(skypilot(job) if engine == "skypilot" else jobset(job, image or IMAGE, nodes))
    if engine == "jobset" and not nodes and (words := any_node_words(job)):
        click.echo(f"memconsole: {words}", err=True)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        write_atomic(output, text.encode(), 0o644)
    except OSError as error:
        raise PlanError(f"{output}: cannot be written: {error.strerror}") from None


def _plan_of(named: str) -> tuple[Plan, str]:
    """A plan and a title for it. A file is a plan; everything else names a run. Raises `PlanError`."""
    path = given_path(named)
    if os.path.isfile(path) or named.endswith(".toml"):
        return load(path), path.stem
    try:
        run = find_run(named)
    except RunError as error:
        raise PlanError(f"{error}, and no plan file of that name") from None
    return run.read_given_plan(), run.name
