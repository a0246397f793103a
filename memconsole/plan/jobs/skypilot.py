"""A plan as a task of SkyPilot, which finds a machine among clouds, Kubernetes and Slurm clusters."""

from __future__ import annotations

from typing import Any

from memconsole.plan.jobs.installing import local_package, pip
from memconsole.plan.jobs.job import ROOT, STOPPED, Job, beside, local_files, script
from memconsole.plan.jobs.machines import check_count, gpu_counts
from memconsole.plan.plan import PlanError

GPUS = {
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
}
"""SkyPilot's names of the catalog's GPUs (`sky show-gpus`)."""
TPUS = {
    "tpu-v2": {8: "tpu-v2-8"},
    "tpu-v3": {8: "tpu-v3-8"},
    "tpu-v4": {4: "tpu-v4-8"},
    "tpu-v5e": {1: "tpu-v5litepod-1", 4: "tpu-v5litepod-4", 8: "tpu-v5litepod-8"},
    "tpu-v5p": {4: "tpu-v5p-8"},
    "tpu-v6e": {1: "tpu-v6e-1", 4: "tpu-v6e-4", 8: "tpu-v6e-8"},
}
"""SkyPilot's names of machines with TPUs, by their number of devices. The number in a name is that of cores up to v4 and
for v5p, and that of chips for v5e and v6e."""


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
    name, count = job.plan.device.name, job.plan.device.count
    if name in TPUS:
        check_count(job.plan, TPUS[name])
        return TPUS[name][count]
    if name not in GPUS:
        raise PlanError(
            f"device.name = {name}: SkyPilot rents none; it knows {', '.join((*GPUS, *TPUS))}",
            "device.name",
        )
    check_count(job.plan, gpu_counts(name))
    return f"{GPUS[name]}:{count}"
