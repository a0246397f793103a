"""The plan's section on where it trains: on this machine, or as a job of a Slurm cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from memconsole.plan.sections.section import Section, about

Where = Literal["here", "slurm"]


class LaunchChoice(Section, frozen=True, kw_only=True):
    on: Annotated[Where, about("where it trains: this machine, or a job of a Slurm cluster")] = (
        "here"
    )
    partition: Annotated[str | None, about("Slurm's partition; none: the cluster's default")] = None
    time_limit: Annotated[
        str | None,
        about("time limit of the job: minutes, HH:MM:SS or D-HH:MM:SS; none: the partition's"),
    ] = None
    devices_per_node: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        about(
            "devices that a node has; none: one node has all. JAX: one process per node, also on a CPU here"
        ),
    ] = None
    save_seconds: Annotated[
        int,
        about(
            "seconds before the time limit at which the run saves and queues again",
            ge=10,
            le=86_400,
        ),
    ] = 300
    options: Annotated[
        str | None, about("more options of sbatch, such as --account=physics --mem=64G")
    ] = None
