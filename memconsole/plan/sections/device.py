"""The plan's section on the device: which kind, how many, and how much of each."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from memconsole.plan.sections.section import Section, about


class DeviceChoice(Section, frozen=True, kw_only=True):
    name: Annotated[
        str, about("auto, cpu, cuda:0, mps, tpu, or a catalog device such as rtx-3060-12gb")
    ] = "auto"
    count: Annotated[int, about("devices of that kind", ge=1, le=4096)] = 1
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        about("CPU threads of a run's computations; none: one for each core it may use"),
    ] = None
    memory_fraction: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None,
        about("share of the device the framework may use"),
    ] = None
