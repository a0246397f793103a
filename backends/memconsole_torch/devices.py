"""The device that a plan names on this machine: choosing, describing and measuring it."""

from __future__ import annotations

import os

import psutil
import torch

from memconsole.plan.machine import processor
from memconsole.plan.plan import DeviceChoice, Plan, PlanError
from memconsole_trainer.engine import DeviceFacts, MemoryReading
from memconsole_trainer.host.gpu_memory import GpuMemory
from memconsole_trainer.host.host_memory import HostMemory


def resolve(choice: DeviceChoice, local_rank: int = 0) -> torch.device:
    """The torch device of `device.name`; auto prefers ROCm or CUDA, then MPS, then the CPU. `local_rank`
    is added to the number of a GPU.

    Raises `PlanError` for a device that this machine or this backend does not have.
    """
    name = choice.name
    if name == "auto":
        if torch.cuda.is_available():
            return _gpu(name, local_rank) if local_rank else torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise _absent(name, "torch finds no Apple GPU here")
        return torch.device("mps")
    kind, _, index = name.partition(":")
    if kind == "cuda" and (index.isdigit() or not index):
        return _gpu(name, int(index or 0) + local_rank)
    if name == "tpu":
        raise _absent(name, 'the torch backend has no TPU; set backend = "jax"')
    raise _absent(name, "a catalog device is for planning, not for running")


def prepare(device: torch.device, plan: Plan) -> None:
    """Apply settings that must precede the first allocation.

    With `train.deterministic`, kernels that add in no fixed order are replaced or refused. On CUDA
    this needs a cuBLAS workspace configuration (PyTorch, "Reproducibility"). On a CPU all kernels
    are deterministic anyway.
    """
    choice = plan.device
    if choice.threads is not None:
        torch.set_num_threads(choice.threads)
    # `use_deterministic_algorithms` would import torch's compiler.
    torch.set_deterministic_debug_mode("error" if plan.train.deterministic else "default")
    # Uninitialized memory is always written before it is read, so it need not be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device.type == "mps" and choice.memory_fraction is not None:
        torch.mps.set_per_process_memory_fraction(choice.memory_fraction)
    if device.type != "cuda":
        return
    if not any(key in os.environ for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # less fragmentation
    if plan.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.cuda.set_device(device)  # streams and events are those of the current device
    if choice.memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(choice.memory_fraction, device)


def has_flash(device: torch.device) -> bool:
    """Whether torch's flash kernel for attention runs on a GPU."""
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)


def facts(device: torch.device) -> DeviceFacts:
    """Name, kind and size of `device`."""
    host_total = psutil.virtual_memory().total
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind = "rocm" if torch.version.hip else "gpu"
        return DeviceFacts(str(device), properties.name, kind, "VRAM", properties.total_memory)
    if device.type == "mps":
        return DeviceFacts("mps", processor.name(), "apple", "unified memory", host_total)
    return DeviceFacts("cpu", processor.name(), "cpu", "host RAM", host_total)


def platform_line(device: DeviceFacts) -> str:
    """The log line that says which device was detected."""
    size = f"{(device.total_bytes or 0) / 2**30:.1f} GiB {device.memory_label}"
    if device.kind == "cpu":
        threads = torch.get_num_threads()
        return f"Detected platform: CPU ({device.name}, {threads} threads, {size})"
    platforms = {
        "gpu": f"CUDA {torch.version.cuda}",
        "rocm": f"ROCm {torch.version.hip}",
        "apple": "Apple MPS",
    }
    return f"Detected platform: {platforms[device.kind]} ({device.name}, {size})"


class DeviceMemory:
    """The memory in use on the device: by its allocator's count, or on a CPU by the growth of the heap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0
        self._host = HostMemory() if device.type == "cpu" else None
        self._driver: GpuMemory | None = None
        if device.type == "cuda" and not torch.version.hip:
            self._driver = GpuMemory(str(torch.cuda.get_device_properties(device).uuid))

    def start(self) -> None:
        """Take the current memory of a CPU as zero, or open NVIDIA's driver. Call before the model is built."""
        if self._host is not None:
            self._host.start()
        if self._driver is not None:
            self._driver.begin()

    def reading(self) -> MemoryReading:
        if self._host is not None:
            used, peak = self._host.growth_bytes(), self._host.peak_bytes()
            return MemoryReading(used, peak, used, used, psutil.virtual_memory().total)
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return MemoryReading(
                torch.cuda.memory_allocated(self._device),
                torch.cuda.max_memory_allocated(self._device),
                torch.cuda.memory_reserved(self._device),
                self._driver_bytes(total - free),
                total,
                torch.cuda.max_memory_reserved(self._device),
            )
        allocated = torch.mps.current_allocated_memory()
        self._peak = max(self._peak, allocated)
        driver = torch.mps.driver_allocated_memory()
        return MemoryReading(
            allocated, self._peak, driver, driver, torch.mps.recommended_max_memory()
        )

    def _driver_bytes(self, used: int) -> int | None:
        """What the driver charges this process. `used` is the use of the card by all processes. It counts where only
        this process is known to use the card, and on ROCm."""
        if self._driver is None:
            return used
        if charged := self._driver.charged():
            return charged[0]
        return used if self._driver.alone else None

    def observe(self) -> None:
        """Update the peak. Call where much memory is in use, because torch tracks no peak on MPS."""
        if self._device.type == "mps":
            self._peak = max(self._peak, torch.mps.current_allocated_memory())

    def reset_peak(self) -> None:
        self._peak = 0
        if self._host is not None:
            self._host.reset_peak()
        elif self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _gpu(name: str, index: int) -> torch.device:
    count = torch.cuda.device_count()
    if index >= count:
        present = f"{count} CUDA or ROCm device{'' if count == 1 else 's'}"
        raise _absent(name, f"torch finds {present} here, and number {index} is wanted")
    return torch.device("cuda", index)


def _absent(name: str, why: str) -> PlanError:
    here = ["auto", "cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        here.append("mps")
    return PlanError(
        f'device.name = "{name}": {why}; expected a device of this machine: {" | ".join(here)}',
        "device.name",
    )
