"""The device that JAX computes on: choosing it, the settings that JAX reads at its start, and its memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jaxlib
import psutil

from memconsole.plan.machine import processor
from memconsole.plan.plan import Plan, PlanError
from memconsole.private_files import private_folder
from memconsole.user_folders import cache_folder
from memconsole_trainer.engine import DeviceFacts, MemoryReading
from memconsole_trainer.host.gpu_memory import GpuMemory
from memconsole_trainer.host.host_memory import HostMemory
from memconsole_trainer.host.platform_lines import optimization_lines

LEAST_COMPILE_SECONDS = 0.1
"""Programs that compile faster are not stored: reading one takes about as long."""
CACHE_BYTES = 2**29
"""Most bytes of compiled programs kept on disk."""
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
_PRODUCTS = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_REDUCE"
"""On a CPU, XLA's library YNNPACK computes reductions only, and products that XLA fuses with one, such as that of attention's
backward pass. Other products of matrices go to Eigen. By default YNNPACK computes all of them. If it cannot allocate memory
for a product, it reports no error and the result holds arbitrary numbers: runs that reached their memory limit ended with
weights that are not finite. Eigen's failed allocation ends the step with an error, or the process. Without YNNPACK (an empty
value) XLA plans a quarter more temporaries for a step of `gearhead`."""
_TRIED = ((0, 10), (0, 11), (0, 12))
"""Versions of jaxlib that know `_PRODUCTS`."""
_LABELS = {"cpu": "host RAM", "gpu": "VRAM", "rocm": "VRAM", "tpu": "HBM"}


def _keep_cores(count: int) -> None:
    """Leave this process `count` of its cores, at random. XLA starts as many threads as it finds cores
    when its first device opens, and has no setting of its own."""
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
        _keep_cores(plan.device.threads)
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
    products_by_eigen()
    if plan.train.deterministic:
        # XLA for GPUs (xla.proto): no atomics, and no autotuning, which may choose differently in
        # each run.
        _add_flag(_DETERMINISTIC)
    if plan.device.memory_fraction is not None:
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # JAX rejects both names together
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(plan.device.memory_fraction)


def products_by_eigen() -> None:
    """Let Eigen compute XLA's products of matrices on a CPU (see `_PRODUCTS`), unless the user's `XLA_FLAGS` choose a
    library. Call before JAX opens a device.

    XLA aborts on a flag that it does not know. So the flag is set only for versions of jaxlib that were tried.
    """
    known = jaxlib.version.__version_info__[:2] in _TRIED
    if known and _PRODUCTS.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        _add_flag(_PRODUCTS)


def _add_flag(flag: str) -> None:
    """Add a flag to `XLA_FLAGS`, once. XLA takes the last of several values of one flag."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def found(plan: Plan, size: int = 1) -> tuple[Any, ...]:
    """This process's devices among the plan's: `device.count` of them, beginning with `device.name`. Each of
    `size` processes has an equal share, in the order of their ranks.

    Raises `PlanError` if a process has fewer.
    """
    first, each = find(plan), plan.device.count // size
    own = jax.local_devices(backend=first.platform)
    skipped = [device.id for device in own].index(first.id)
    chosen: list[Any] = []
    for rank in range(size):
        alike = own if size == 1 else jax.local_devices(rank, first.platform)
        alike = alike[skipped:]
        if len(alike) < each:
            where = f"on node {rank + 1} of {size}" if size > 1 else "here"
            raise PlanError(
                f"device.count = {plan.device.count}: JAX sees {len(alike)} from device {skipped} on {where}",
                "device.count",
            )
        chosen += alike[:each]
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
    """Describe `device` for the console."""
    kind = kind_of(device)
    stats = device.memory_stats() or {}
    if kind == "cpu":
        return DeviceFacts(
            "cpu", processor.name(), kind, _LABELS[kind], psutil.virtual_memory().total
        )
    prefix = {"gpu": "cuda", "rocm": "cuda"}.get(kind, kind)
    identity = f"{prefix}:{device.local_hardware_id or 0}"
    return DeviceFacts(identity, device.device_kind, kind, _LABELS[kind], stats.get("bytes_limit"))


def kind_of(device: Any) -> str:
    """cpu | gpu | rocm | tpu."""
    if device.platform == "gpu" and "rocm" in str(device.client.platform_version).lower():
        return "rocm"
    return {"cuda": "gpu"}.get(device.platform, device.platform)


def keep_compilations() -> None:
    """Let JAX store compiled programs on disk, so that a resumed run need not compile again.

    A program compiled for one processor may not run on another, and machines may share a home
    directory. So each kind of processor has its own cache directory.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    key = hashlib.sha256(_cpu_features().encode()).hexdigest()[:12]
    path = cache_folder() / "jax" / f"{platform.machine()}-{key}"
    try:
        private_folder(path)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_SECONDS)
    _forget_oldest(path, CACHE_BYTES)


def _forget_oldest(directory: Path, most: int) -> None:
    """Delete files of `directory`, oldest first, until `most` bytes remain.

    JAX's own limit needs a file-lock library, and warns if entries with and without it are mixed.
    """
    found = []
    with contextlib.suppress(OSError):
        found = [(x.stat().st_mtime, x.stat().st_size, x) for x in directory.iterdir()]
    excess = sum(size for _, size, _ in found) - most
    for _, size, file in sorted(found):
        if excess <= 0:
            return
        with contextlib.suppress(OSError):
            file.unlink()
        excess -= size


def _cpu_features() -> str:
    return " ".join([*sorted(processor.flags()), platform.machine(), processor.name()])


class DeviceMemory:
    """The memory in use on a device. On a CPU it is the growth of this process since `start`, divided by the
    number of devices that share it. Elsewhere it is what XLA's allocator has in use on the fullest device of
    this process."""

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
            held = [_held(device.memory_stats() or {}) for device in self._devices]
            return tuple(_charged(held, self._driver.charged() if self._driver else []))
        count = len(self._devices)
        now, peak = self._host.growth_bytes() // count, self._host.peak_bytes() // count
        return (MemoryReading(now, peak, now, now, self._total),)

    def reset_peak(self) -> None:
        """Works only on a CPU: XLA's allocators cannot reset their peak."""
        if self._host is not None:
            self._host.reset_peak()


def _held(stats: Mapping[str, int]) -> MemoryReading:
    """A reading from the statistics of XLA's allocator."""
    return MemoryReading(
        stats.get("bytes_in_use"),
        stats.get("peak_bytes_in_use"),
        stats.get("pool_bytes", stats.get("bytes_reserved")),
        None,
        stats.get("bytes_limit"),
        stats.get("peak_pool_bytes"),
    )


def _charged(held: list[MemoryReading], charged: list[int]) -> list[MemoryReading]:
    """The readings, each with what the driver charges this process on that card. `charged` begins with the largest.

    JAX does not tell which of the driver's cards a device is. On each card the driver charges the allocator's pool and
    about the same context, so both orders by size are the same. Cards that JAX opened and does not compute on are last.
    """
    found = list(held)
    largest_first = sorted(
        range(len(held)),
        key=lambda n: held[n].reserved_bytes or held[n].allocated_bytes or 0,
        reverse=True,
    )
    for n, bytes_ in zip(largest_first, charged, strict=False):
        found[n] = replace(held[n], device_bytes=bytes_)
    return found


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
