"""A plan as a JobSet of Kubernetes (jobset.x-k8s.io/v1alpha2)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from memconsole.plan import catalog
from memconsole.plan.jobs.installing import local_package, pip
from memconsole.plan.jobs.job import MAY_BE_ABSENT, ROOT, Job, local_files, script
from memconsole.plan.jobs.machines import CORES, TPU_COUNTS, check_count, gpu_counts
from memconsole.plan.plan import Plan, PlanError, quote

IMAGE = "python:3.12"
GRACE_SECONDS = 600
"""Seconds that a pod has for its last checkpoint when it is evicted."""
RESTARTS = 10
LABELS = {
    "gpu": "nvidia.com/gpu.product=NAME",
    "rocm": "amd.com/gpu.product-name=NAME",
    "tpu": "cloud.google.com/gke-tpu-accelerator=NAME and cloud.google.com/gke-tpu-topology=NxM",
}
"""The labels that the device plugins of a kind give to nodes."""
_NAME = r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"(?=.{1,253}/)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
_LABEL = re.compile(rf"(({_DOMAIN}/)?{_NAME})=({_NAME}|)", re.ASCII)
_HERE_TOO = "; it must be on this machine, too, under the same path"
"""Said of what is read before the job file is written."""
_RESOURCES = {"gpu": "nvidia.com/gpu", "rocm": "amd.com/gpu", "tpu": "google.com/tpu"}


def jobset(job: Job, image: str = IMAGE, nodes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The manifest, for nodes that have all labels of `nodes`. Raises `PlanError` for files of this machine, which a
    pod does not have, and for devices that no cluster has."""
    for key, path in local_files(job.plan).items():
        if not str(path).startswith(f"{ROOT}/"):
            raise PlanError(
                f"{key} = {path}: a file of this machine, which a pod does not have; name a dataset or model "
                f"of the hub, or a file under {ROOT}, where the volume is{'' if key in MAY_BE_ABSENT else _HERE_TOO}",
                key,
            )
    for word in job.install:
        package = local_package(word)
        if package and not str(package[0]).startswith(f"{ROOT}/"):
            raise PlanError(
                f"--install {word}: a file of this machine, which a pod does not have; give a URL, or a file "
                f"under {ROOT}, where the volume is"
            )
    template = {
        "spec": {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": 0,
            "template": {"spec": _pod(job, image, nodes)},
        }
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


def _pod(job: Job, image: str, nodes: Mapping[str, str] | None) -> dict[str, Any]:
    """A pod with the trainer, the volume of the run and memory to share between processes."""
    volume: dict[str, Any] = {"emptyDir": {}}
    if job.volume:
        volume = {"persistentVolumeClaim": {"claimName": job.volume}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        **({"nodeSelector": dict(nodes)} if nodes else {}),
        "containers": [_container(job, image)],
        "volumes": [
            {"name": "run", **volume},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _container(job: Job, image: str) -> dict[str, Any]:
    limits: dict[str, Any] = {"memory": f"{job.host_gib}Gi"}
    if job.accelerator is not None:
        limits[_resource(job.accelerator)] = _count(job.plan)
    return {
        "name": "trainer",
        "image": image,
        "command": ["bash", "-c"],
        "args": [script(job, {}, pip(job.install))],
        "resources": {"requests": {"memory": limits["memory"]}, "limits": limits},
        "volumeMounts": [
            {"name": "run", "mountPath": ROOT},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def node_labels(assignments: Iterable[str]) -> dict[str, str]:
    """The labels of ``KEY=VALUE`` texts. Raises `PlanError` for one that no node can have."""
    for text in assignments:
        if not _LABEL.fullmatch(text):
            raise PlanError(
                f"--node-selector {quote(text)}: expected a label of a node as KEY=VALUE, such as "
                "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"
            )
    return dict(text.split("=", 1) for text in assignments)


def any_node_words(job: Job) -> str | None:
    """Says that the manifest does not choose the card, and which labels do; None for a CPU."""
    if job.accelerator is None:
        return None
    label = LABELS[catalog.catalog_device(job.accelerator).kind]
    return (
        f"the job takes any node that has {_resource(job.accelerator)}; to have {job.accelerator}, choose the node by "
        f"its labels: --node-selector, such as {label}"
    )


def _count(plan: Plan) -> int:
    """How many of its device a pod asks for, in Kubernetes' unit. Raises `PlanError`."""
    name, count = plan.device.name, plan.device.count
    check_count(plan, TPU_COUNTS.get(name) or gpu_counts(name))
    return count // 2 if name in CORES else count


def _resource(device: str) -> str:
    kind = catalog.catalog_device(device).kind
    if kind not in _RESOURCES:
        raise PlanError(
            f"device.name = {device}: Kubernetes has no such devices; expected cpu, a GPU or a TPU",
            "device.name",
        )
    return _RESOURCES[kind]
