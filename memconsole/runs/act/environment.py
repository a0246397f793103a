"""The environment a trainer starts in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from memconsole.cache import cache_folder
from memconsole.plan.plan import Plan

RUN_ID = "MEMCONSOLE_RUN_ID"
ATTEMPT = "MEMCONSOLE_ATTEMPT"

MALLOC_RETURNS = {
    "torch": {
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    },
    "jax": {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        "MALLOC_TRIM_THRESHOLD_": "1048576",
    },
}
"""glibc gives freed memory back to the system, so that resident memory shows tensors and not its own
caches. At its own threshold of 128 KiB torch's tensors of small models leave a heap in pieces: 11 MiB unexplained of
28 against 5 at 64 KiB, which costs a few per cent of their time. XLA holds few arrays, and scratch of its matrix
library that comes and goes many times a step: 1 MiB gives as much back."""


def device_kind(plan: Plan, devices: Path = Path("/dev"), platform: str = sys.platform) -> str:
    """cpu, cuda, rocm, apple or tpu, as far as names and device files tell without any driver call."""
    name = plan.device.name
    nvidia = any((devices / file).exists() for file in ("nvidiactl", "dxg"))
    amd = (devices / "kfd").exists() and not nvidia
    if name in ("cpu", "tpu"):
        return name
    if name == "mps" or (name == "auto" and platform == "darwin"):
        return "apple"
    if name.startswith("cuda") or nvidia or amd:
        return "rocm" if amd else "cuda"
    tpu_files = (*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*"))
    return "tpu" if tpu_files else "cpu"


def trainer_environment(
    plan: Plan,
    inherited: Mapping[str, str],
    run_id: str = "",
    attempt: int = 0,
    kind: str | None = None,
) -> dict[str, str]:
    """`inherited` plus what the plan's backend and device need; a person's own settings stay.

    Sources: PyTorch "CUDA semantics: optimizing memory usage with PYTORCH_ALLOC_CONF"; JAX "GPU memory
    allocation"; mallopt(3).
    """
    kind = kind or device_kind(plan)
    wanted: dict[str, str] = {}
    if kind == "cpu":
        wanted |= MALLOC_RETURNS[plan.backend]
    if plan.backend == "torch" and kind == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in inherited:
        # Segments that grow keep reserved close to allocated.
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if plan.backend == "torch" and plan.optimize.compile:
        # Its default is a fixed name in the shared temporary folder, which anyone may make first.
        wanted["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder(inherited) / "inductor")
    if plan.backend == "jax":
        # Otherwise JAX takes three quarters of the GPU at once and its own account is all that is left.
        wanted["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if kind == "cpu":
            wanted["JAX_PLATFORMS"] = "cpu"
    environment = wanted | dict(inherited)
    if plan.backend == "jax" and plan.device.memory_fraction is not None:
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{plan.device.memory_fraction:g}"
    environment["PYTHONUNBUFFERED"] = "1"
    environment[RUN_ID] = run_id
    environment[ATTEMPT] = str(attempt)
    return environment
