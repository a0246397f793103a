"""A plan as a task of SkyPilot, which finds a machine among clouds, Kubernetes and Slurm clusters."""

from __future__ import annotations

from typing import Any

from memconsole.plan.jobs.installing import local_package, pip
from memconsole.plan.jobs.job import ROOT, STOPPED, Job, beside, local_files, script
from memconsole.plan.plan import PlanError

ACCELERATORS = {
    "rtx-3060-12gb": "RTX3060",
    "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090",
    "rtx-5080-16gb": "RTX5080",
    "rtx-5090": "RTX5090",
    "t4": "T4",
    "v100-16gb": "V100",
    "v100-32gb": "V100-32GB",
    "a10": "A10",
    "l4": "L4",
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "h100-80gb": "H100",
    "h200": "H200",
    "b200": "B200",
    "mi300x": "MI300X",
    "tpu-v2": "tpu-v2-{count}",
    "tpu-v3": "tpu-v3-{count}",
    "tpu-v4": "tpu-v4-{count}",
    "tpu-v5e": "tpu-v5litepod-{count}",
    "tpu-v5p": "tpu-v5p-{count}",
    "tpu-v6e": "tpu-v6e-{count}",
}
"""SkyPilot's names of the catalog's devices (`sky show-gpus`); a TPU's contains the number of chips."""


def skypilot(job: Job) -> dict[str, Any]:
    """The task. Raises `PlanError` for a device that SkyPilot has no name for."""
    files = local_files(job.plan)
    moved = {key: f"{ROOT}/inputs/{key}/{path.name}" for key, path in files.items()}
    mounts = {moved[key]: str(path) for key, path in files.items()}
    mounts |= {f"{ROOT}/inputs/data.source/{path.name}": str(path) for path in beside(job.plan)}
    install = list(job.install)
    for place, word in enumerate(install):
        if package := local_package(word):
            file, extras = package
            there = f"{ROOT}/inputs/install/{file.name}"
            mounts[there], install[place] = str(file), there + extras
    resources: dict[str, Any] = {"memory": f"{job.host_gib}+"}
    if job.accelerator is not None:
        resources["accelerators"] = _accelerators(job)
    # A managed job that was stopped goes on with the next machine.
    resources["job_recovery"] = {"recover_on_exit_codes": [STOPPED]}
    document: dict[str, Any] = {"name": job.name, "num_nodes": 1, "resources": resources}
    if mounts:
        document["file_mounts"] = mounts
    if job.volume is not None:
        document["volumes"] = {f"{ROOT}/state": job.volume}
    document["setup"] = (
        f'sudo mkdir -p {ROOT}/state && sudo chown "$(id -u)" {ROOT} {ROOT}/state\n{pip(install)}\n'
    )
    document["run"] = script(job, moved)
    return document


def _accelerators(job: Job) -> str:
    name = ACCELERATORS.get(job.accelerator or "")
    if name is None:
        raise PlanError(
            f"device.name = {job.accelerator}: SkyPilot rents none; it knows {', '.join(ACCELERATORS)}",
            "device.name",
        )
    count = job.plan.device.count
    return name.format(count=count) if "{" in name else f"{name}:{count}"
