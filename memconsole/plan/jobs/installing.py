"""What a job installs before it trains."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

import memconsole
from memconsole.given_path import given_path
from memconsole.plan.check import device_kind
from memconsole.plan.machine.trackers import wanted
from memconsole.plan.plan import Plan, PlanError


def package(plan: Plan) -> str:
    """This version of memconsole, with the extras that the plan needs on its device.

    Raises `PlanError` for an AMD GPU, whose builds of the frameworks no extra can name.
    """
    kind = device_kind(plan.device.name) or "cpu"
    if kind == "rocm":
        raise PlanError(
            f"device.name = {plan.device.name}: {plan.backend} for AMD GPUs is not on the package index; name what "
            "the job installs with --install",
            "device.name",
        )
    extra = {("jax", "gpu"): "jax-cuda", ("jax", "tpu"): "tpu"}.get((plan.backend, kind))
    extras = ",".join((extra or plan.backend, *wanted(plan)))
    return f"memconsole[{extras}]=={memconsole.__version__}"


def local_package(word: str) -> tuple[Path, str] | None:
    """The wheel of this machine that an argument of pip names, and its extras; None for anything else."""
    file, bracket, extras = word.partition("[")
    path = given_path(file)
    return (path.absolute(), bracket + extras) if os.path.isfile(path) else None


def pip(install: Iterable[str]) -> str:
    """The command that installs."""
    return shlex.join(("pip", "install", *install))
