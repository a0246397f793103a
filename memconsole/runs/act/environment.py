"""Builds the environment variables of a trainer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from memconsole.plan.machine import jemalloc
from memconsole.plan.machine.inductor_cache import inductor_cache
from memconsole.plan.plan import Plan
from memconsole.plan.processes import processes

RUN_ID = "MEMCONSOLE_RUN_ID"
ATTEMPT = "MEMCONSOLE_ATTEMPT"

_HOST_DEVICES = "--xla_force_host_platform_device_count"
"""XLA's flag for several devices on a CPU."""
NEVER = str(2**40)
"""As a threshold in bytes: no array is that large."""
ARENAS = {"torch": "2", "jax": "1"}
HEAPS = {
    ("torch", "fast"): (NEVER, NEVER),
    ("jax", "fast"): ("16777216", NEVER),
    ("torch", "tight"): ("65536", "131072"),
    ("jax", "tight"): ("1048576", "1048576"),
}
"""Thresholds of glibc's malloc in bytes, by backend and `optimize.heap`. The first is the size from which a block gets a
memory mapping of its own, which is unmapped when the block is freed. The second is the number of free bytes at the end
of the heap from which they are returned to the system.

XLA takes one block for all of a step's arrays. In a heap that never returns memory, a small array can be placed where
that block was, and then the heap has two such blocks: 170 MiB for a step of 100. In huge pages the system clears the
block so fast that mapping it anew for each step costs a few per cent of the speed; in small pages it costs a tenth.

With tight, resident memory shows tensors and not glibc's caches. At glibc's own threshold of
128 KiB, torch's tensors of small models fragment the heap: of 28 MiB, 11 MiB are unexplained,
compared with 5 MiB at 64 KiB. XLA has few arrays, but its matrix library allocates and frees scratch
memory many times a step; there a threshold of 1 MiB returns as much. The system clears each new page: a
step of a small model then takes half as long again (docs/optimizations.md).
"""
ROOM = str(64 << 20)
"""Bytes by which torch's fast heap grows beyond each request. They take no memory until they are used. Without this room
after the largest blocks, a small array placed in a freed block makes the heap grow by another block of that size. JAX's
largest blocks are not in the heap; in such room they would be."""
NO_MAPPINGS = {"MALLOC_MMAP_MAX_": "0"}
"""For torch's fast heap: no block gets a mapping of its own. The threshold alone is not enough, because old versions of
glibc (2.33) ignore one above 32 MiB."""
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""The C library asks for huge pages (glibc 2.35 and later). It does nothing where the system has none to give."""
JEMALLOC_CONF = "dirty_decay_ms:-1,muzzy_decay_ms:-1,narenas:1,retain:false"
"""Freed pages stay, in one arena. Nothing is mapped ahead, because a memory limit would count it."""


def device_kind(plan: Plan, devices: Path = Path("/dev"), platform: str = sys.platform) -> str:
    """cpu, cuda, rocm, apple or tpu, guessed from names and device files without a driver call."""
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


SPINS = "10000"
"""How many times an idle thread of torch looks for work before it sleeps. This takes a few tenths of a millisecond, longer
than most gaps between two operations. By default it spins for milliseconds. If other processes are busy, it then takes
the cores from the threads that it waits for. A step of a GPT of 0.8 M parameters on two cores took 0.4 to 0.5 s beside eight busy
processes, and 1.4 s by default; beside none it took 40 ms with either, and 45 ms with 1,000 spins."""


def trainer_environment(
    plan: Plan,
    inherited: Mapping[str, str],
    run_id: str = "",
    attempt: int = 0,
    kind: str | None = None,
) -> dict[str, str]:
    """`inherited` plus what the plan's backend and device need. Variables the user set are kept, unless the plan sets
    the same. Raises `PlanError` if the devices do not fill their nodes.

    Sources: PyTorch "CUDA semantics: optimizing memory usage with PYTORCH_ALLOC_CONF"; JAX "GPU
    memory allocation"; mallopt(3).
    """
    kind = kind or device_kind(plan)
    # Otherwise the library tokenizes with one thread after the process was forked.
    wanted = {"TOKENIZERS_PARALLELISM": "true"}
    if kind == "cpu":
        wanted |= _heap(plan)
        if plan.backend == "torch" and "OMP_WAIT_POLICY" not in inherited:
            wanted["GOMP_SPINCOUNT"] = SPINS
    if plan.backend == "torch" and kind == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in inherited:
        wanted["PYTORCH_ALLOC_CONF"] = _allocator()
    if plan.backend == "torch" and plan.optimize.compile:
        wanted |= inductor_cache(inherited)
    if plan.backend == "jax":
        # By default JAX reserves three quarters of the GPU at once; only its own statistics would
        # then show how much is used.
        wanted["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if kind == "cpu":
            wanted["JAX_PLATFORMS"] = "cpu"
    environment = wanted | dict(inherited)
    flags = inherited.get("XLA_FLAGS", "")
    own = plan.device.count // processes(plan)
    if plan.backend == "jax" and kind == "cpu" and own > 1 and _HOST_DEVICES not in flags:
        environment["XLA_FLAGS"] = f"{flags} {_HOST_DEVICES}={own}".strip()
    if kind == "cpu" and plan.optimize.heap == "jemalloc" and jemalloc.library():
        others = inherited.get("LD_PRELOAD", "")
        environment["LD_PRELOAD"] = f"{jemalloc.library()}:{others}".rstrip(":")
    if plan.backend == "jax" and plan.device.memory_fraction is not None:
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{plan.device.memory_fraction:g}"
    environment["PYTHONUNBUFFERED"] = "1"
    environment[RUN_ID] = run_id
    environment[ATTEMPT] = str(attempt)
    return environment


def _allocator() -> str:
    """Settings of torch's allocators for a GPU. Segments that can grow keep reserved memory close to allocated memory.
    Pinned host memory is not rounded up to a power of two, which is possible since torch 2.13."""
    settings = "expandable_segments:True"
    try:
        major, minor = (int(part) for part in metadata.version("torch").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return settings
    return f"{settings},pinned_max_round_threshold_mb:1" if (major, minor) >= (2, 13) else settings


def _heap(plan: Plan) -> dict[str, str]:
    """Settings of the C library's heap, or of jemalloc in its place."""
    if plan.optimize.heap == "jemalloc":
        return {"MALLOC_CONF": JEMALLOC_CONF}
    backend = plan.backend if plan.backend in ARENAS else "torch"
    from_system, returned = HEAPS[backend, plan.optimize.heap]
    fast = plan.optimize.heap == "fast"
    room = {"MALLOC_TOP_PAD_": ROOM, **NO_MAPPINGS} if fast and backend == "torch" else {}
    pages = {"GLIBC_TUNABLES": HUGE_PAGES} if fast and backend == "jax" else {}
    return (
        room
        | pages
        | {
            "MALLOC_ARENA_MAX": ARENAS[backend],
            "MALLOC_MMAP_THRESHOLD_": from_system,
            "MALLOC_TRIM_THRESHOLD_": returned,
        }
    )
