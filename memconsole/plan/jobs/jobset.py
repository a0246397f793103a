"""A plan as a JobSet of Kubernetes (jobset.x-k8s.io/v1alpha2)."""

from __future__ import annotations

from typing import Any

from memconsole.plan import catalog
from memconsole.plan.jobs.job import ROOT, Job, local_files, script
from memconsole.plan.plan import PlanError

IMAGE = "python:3.12"
GRACE_SECONDS = 600
"""Seconds that a pod has for its last checkpoint when it is evicted."""
RESTARTS = 10
_RESOURCES = {"gpu": "nvidia.com/gpu", "rocm": "amd.com/gpu", "tpu": "google.com/tpu"}


def jobset(job: Job, image: str = IMAGE) -> dict[str, Any]:
    """The manifest. Raises `PlanError` for files of this machine, which a pod does not have, and for
    devices that no cluster has."""
    for key, path in local_files(job.plan).items():
        if not str(path).startswith(f"{ROOT}/"):
            raise PlanError(
                f"{key} = {path}: a file of this machine, which a pod does not have; name a dataset or model "
                f"of the hub, or a file under {ROOT}, where the volume is",
                key,
            )
    limits: dict[str, Any] = {"memory": f"{job.host_gib}Gi"}
    if job.accelerator is not None:
        limits[_resource(job.accelerator)] = job.plan.device.count
    container = {
        "name": "trainer",
        "image": image,
        "command": ["bash", "-c"],
        "args": [f"pip install '{job.install}' || exit 1\n{script(job, {})}"],
        "resources": {"requests": {"memory": limits["memory"]}, "limits": limits},
        "volumeMounts": [
            {"name": "run", "mountPath": ROOT},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    kept = {"persistentVolumeClaim": {"claimName": job.volume}} if job.volume else {"emptyDir": {}}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "run", **kept},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    template = {
        "spec": {"parallelism": 1, "completions": 1, "backoffLimit": 0, "template": {"spec": pod}}
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            # Each restart continues the run on the volume from its newest checkpoint.
            "failurePolicy": {"maxRestarts": RESTARTS if job.volume else 0},
            "replicatedJobs": [{"name": "train", "replicas": 1, "template": template}],
        },
    }


def _resource(device: str) -> str:
    kind = catalog.catalog_device(device).kind
    if kind not in _RESOURCES:
        raise PlanError(
            f"device.name = {device}: Kubernetes has no such devices; expected cpu, a GPU or a TPU",
            "device.name",
        )
    return _RESOURCES[kind]
