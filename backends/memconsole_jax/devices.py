"""The devices that JAX computes on: finding them, the settings that JAX reads before it opens them, and their memory."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jaxlib
import psutil

from memconsole.plan.machine import processor
from memconsole.plan.plan import Plan, PlanError
from memconsole_trainer.engine import DeviceFacts, MemoryReading
from memconsole_trainer.host.gpu_memory import GpuMemory
from memconsole_trainer.host.host_memory import HostMemory
from memconsole_trainer.host.platform_lines import optimization_lines

_DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"
_MATMUL_FLAG = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_REDUCE"
"""With this flag, XLA on a CPU lets Eigen compute products of matrices. Its other library, YNNPACK, computes only
reductions, and products that XLA fuses with a reduction, such as one of attention's backward pass.

By default YNNPACK computes all products. If it cannot allocate memory for one, it reports no error and the result holds
arbitrary numbers: runs that reached their memory limit ended with weights that are not finite. If an allocation of
Eigen's fails, the step ends with an error, or the process does. With no YNNPACK at all (an empty value of this flag) XLA
plans a quarter more temporaries for a step of the model `gearhead`."""
_VERSIONS_WITH_MATMUL_FLAG = ((0, 10), (0, 11), (0, 12))
"""Versions of jaxlib that know `_MATMUL_FLAG`."""
_MEMORY_LABELS = {"cpu": "host RAM", "gpu": "VRAM", "rocm": "VRAM", "tpu": "HBM"}


def _limit_cores(count: int) -> None:
    """Restrict this process to `count` of its cores, chosen at random. XLA has no setting for its threads: when its first
    device opens, it starts as many as the process has cores."""
    if hasattr(os, "sched_setaffinity"):  # only Linux has it
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, random.sample(cores, min(count, len(cores))))


def prepare(plan: Plan) -> None:
    """Apply settings that JAX reads when it first opens its devices.

    GPU memory is allocated as needed instead of 75 % at the start, unless the user's environment
    says otherwise. `device.memory_fraction` limits it.
    """
    name = plan.device.name
    if plan.device.threads is not None:
        _limit_cores(plan.device.threads)
    # With asynchronous dispatch, a CPU's next step would begin before the last one's temporaries
    # are freed.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")  # do not probe plugins
    elif name == "tpu":
        jax.config.update("jax_platforms", "tpu,cpu")
    elif name.startswith("cuda"):
        jax.config.update("jax_platforms", "cuda,cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    matmul_with_eigen()
    if plan.train.deterministic:
        # XLA for GPUs (xla.proto): no atomics, and no autotuning, which may choose differently in
        # each run.
        _add_flag(_DETERMINISTIC_FLAG)
    if plan.device.memory_fraction is not None:
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # JAX rejects both names together
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(plan.device.memory_fraction)


def matmul_with_eigen() -> None:
    """Let Eigen compute XLA's products of matrices on a CPU (see `_MATMUL_FLAG`), unless the user's `XLA_FLAGS` choose a
    library. Call before JAX opens a device.

    XLA aborts on a flag that it does not know. So the flag is set only for versions of jaxlib that were tried.
    """
    known = jaxlib.version.__version_info__[:2] in _VERSIONS_WITH_MATMUL_FLAG
    if known and _MATMUL_FLAG.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        _add_flag(_MATMUL_FLAG)


def _add_flag(flag: str) -> None:
    """Add a flag to `XLA_FLAGS`, once. XLA takes the last of several values of one flag."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def find_all(plan: Plan, processes: int = 1) -> tuple[Any, ...]:
    """The `jax.Device`s that the plan computes on, `device.count` of them. Each of the `processes` has an equal share, in
    the order of their ranks, beginning with its device of the number in `device.name`.

    Raises `PlanError` if a process has fewer.
    """
    first, per_process = find(plan), plan.device.count // processes
    local = jax.local_devices(backend=first.platform)
    skipped = [device.id for device in local].index(first.id)
    chosen: list[Any] = []
    for rank in range(processes):
        devices = local if processes == 1 else jax.local_devices(rank, first.platform)
        devices = devices[skipped:]
        if len(devices) < per_process:
            where = f"on node {rank + 1} of {processes}" if processes > 1 else "here"
            raise PlanError(
                f"device.count = {plan.device.count}: JAX sees {len(devices)} from device {skipped} on {where}",
                "device.count",
            )
        chosen += devices[:per_process]
    return tuple(chosen)


def find(plan: Plan) -> Any:
    """The `jax.Device` of `device.name`. Raises `PlanError` if this machine has no such device."""
    name = plan.device.name
    kind, _, index = name.partition(":")
    try:
        if name == "auto":
            return jax.local_devices()[0]  # JAX prefers TPU, then GPU, then CPU
        if kind in ("cpu", "tpu"):
            return jax.local_devices(backend=kind)[0]
        if kind == "cuda":
            devices = jax.local_devices(backend="cuda")
            number = int(index or 0)
            if number < len(devices):
                return devices[number]
            raise PlanError(
                f"device.name = {name}: JAX sees {len(devices)} CUDA devices", "device.name"
            )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PlanError(
            f"device.name = {name}: JAX has no such device here ({reason})", "device.name"
        ) from None
    raise PlanError(
        f"device.name = {name}: the jax backend trains on auto | cpu | cuda:N | tpu; "
        "catalog devices are for planning",
        "device.name",
    )


def facts(device: Any) -> DeviceFacts:
    """Describe a `jax.Device` for the console."""
    kind = kind_of(device)
    stats = device.memory_stats() or {}
    if kind == "cpu":
        return DeviceFacts(
            "cpu", processor.name(), kind, _MEMORY_LABELS[kind], psutil.virtual_memory().total
        )
    prefix = {"gpu": "cuda", "rocm": "cuda"}.get(kind, kind)
    identity = f"{prefix}:{device.local_hardware_id or 0}"
    return DeviceFacts(
        identity, device.device_kind, kind, _MEMORY_LABELS[kind], stats.get("bytes_limit")
    )


def kind_of(device: Any) -> str:
    """The kind of a `jax.Device`: cpu | gpu | rocm | tpu."""
    if device.platform == "gpu" and "rocm" in str(device.client.platform_version).lower():
        return "rocm"
    return {"cuda": "gpu"}.get(device.platform, device.platform)


class DeviceMemory:
    """The memory in use on the devices of this process. On a CPU it is the growth of the process since `start`, divided by
    the number of devices that share it. Elsewhere it is what XLA's allocator has in use."""

    def __init__(self, devices: tuple[Any, ...], facts: DeviceFacts) -> None:
        self._devices, self._total = devices, facts.total_bytes
        self._host = HostMemory() if facts.kind == "cpu" else None
        self._driver = GpuMemory() if facts.kind == "gpu" else None

    def start(self) -> None:
        """Take the current memory of a CPU as zero, or open NVIDIA's driver."""
        if self._host is not None:
            self._host.start()
        if self._driver is not None:
            self._driver.begin()

    def reading(self) -> MemoryReading:
        """The reading of the fullest device."""
        return max(self.readings(), key=lambda one: one.peak_bytes or 0)

    def readings(self) -> tuple[MemoryReading, ...]:
        """A reading of each device. On a CPU there is one for all, because its devices share one heap."""
        if self._host is None:
            readings = [_allocator_reading(device.memory_stats() or {}) for device in self._devices]
            charged = self._driver.charged() if self._driver else []
            return tuple(_with_driver_bytes(readings, charged))
        count = len(self._devices)
        now, peak = self._host.growth_bytes() // count, self._host.peak_bytes() // count
        return (MemoryReading(now, peak, now, now, self._total),)

    def reset_peak(self) -> None:
        """Works only on a CPU: XLA's allocators cannot reset their peak."""
        if self._host is not None:
            self._host.reset_peak()


def _allocator_reading(stats: Mapping[str, int]) -> MemoryReading:
    """A reading from the statistics of XLA's allocator."""
    return MemoryReading(
        stats.get("bytes_in_use"),
        stats.get("peak_bytes_in_use"),
        stats.get("pool_bytes", stats.get("bytes_reserved")),
        None,
        stats.get("bytes_limit"),
        stats.get("peak_pool_bytes"),
    )


def _with_driver_bytes(readings: list[MemoryReading], charged: list[int]) -> list[MemoryReading]:
    """The readings, each with the bytes that the driver charges this process on that card. `charged` holds these bytes for
    each card that the process has opened, the largest first.

    JAX does not tell which of the driver's cards a device is. But on each card the driver charges the allocator's pool
    and a context of about the same size, so the card with the largest pool has the largest charge, and so on. Cards that
    JAX opened and does not compute on come last.
    """
    completed = list(readings)
    largest_first = sorted(
        range(len(readings)),
        key=lambda n: readings[n].reserved_bytes or readings[n].allocated_bytes or 0,
        reverse=True,
    )
    for n, device_bytes in zip(largest_first, charged, strict=False):
        completed[n] = replace(readings[n], device_bytes=device_bytes)
    return completed


_PRECISIONS = {
    "bf16": "Mixed precision (bfloat16) enabled - {}; fp32 master weights and loss",
    "bf16-sr": "Weights in bfloat16, stochastically rounded - {}; fp32 norms and loss",
    "fp16": "Mixed precision (float16, dynamic loss scaling) enabled - {}; fp32 master weights and loss",
}


def platform_lines(plan: Plan, device: DeviceFacts) -> list[str]:
    """Lines for the log: what was detected and which optimizations are on."""
    o = plan.optimize
    name = {"cpu": "CPU", "gpu": "NVIDIA GPU", "rocm": "AMD GPU (ROCm)", "tpu": "TPU"}[device.kind]
    lines = [f"Detected platform: {name} ({device.name}) with JAX {jax.__version__}"]
    if o.precision != "fp32":
        if device.kind == "cpu":
            note = "XLA on a CPU computes in fp32, so it is no faster than fp32"
        else:
            best = device.kind == "tpu" and o.precision != "fp16"
            note = "optimal for TPU" if best else f"16-bit compute on {name}"
        lines.append(_PRECISIONS[o.precision].format(note))
    lines += optimization_lines(plan, device.kind)
    if o.compile:
        lines.append("Blocks are compiled one by one, which takes longer than one in a loop")
    if o.optimizer_offload == "none":
        lines.append("One compiled training step; weights and optimizer state updated in place")
    return lines
