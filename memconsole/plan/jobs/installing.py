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


def check_install(plan: Plan, install: tuple[str, ...]) -> None:
    """Raise `PlanError` if nothing says where a job gets memconsole from: it is on no public package index. The message
    names a wheel with the extras that the plan needs on its device."""
    if install:
        return
    kind = device_kind(plan.device.name) or "cpu"
    extra = {("jax", "gpu"): "jax-cuda", ("jax", "tpu"): "tpu"}.get((plan.backend, kind))
    extras = ",".join((extra or plan.backend, *wanted(plan)))
    wheel = f"./memconsole-{memconsole.__version__}-py3-none-any.whl[{extras}]"
    builds = f"; builds of {plan.backend} for AMD GPUs need their own index too" * (kind == "rocm")
    raise PlanError(
        f"--install is missing; name what the job installs, as --install '{wheel}' "
        f"(pip wheel . --no-deps makes this file in a checkout), or the URL of one{builds}"
    )


def local_package(word: str) -> tuple[Path, str] | None:
    """The wheel of this machine that an argument of pip names, and its extras; None for anything else."""
    file, bracket, extras = word.partition("[")
    path = given_path(file)
    return (path.absolute(), bracket + extras) if os.path.isfile(path) else None


def pip(install: Iterable[str]) -> str:
    """The command that installs."""
    return shlex.join(("pip", "install", *install))
