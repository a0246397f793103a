"""Reads NVIDIA devices through NVML. A driver error becomes the reason for a missing number."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import psutil
import pynvml

from memconsole.devices.reading import DeviceReading, Missing, Process
from memconsole.devices.visible import visible_order
from memconsole.sanitize import clean_line

_Value = TypeVar("_Value")

_REASONS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no driver (libnvidia-ml.so.1 not found)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "driver not loaded (its kernel module is missing)",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver and library versions differ; reboot or reload the driver",
    pynvml.NVML_ERROR_GPU_IS_LOST: "GPU lost (it has fallen off the bus or is inaccessible)",
    pynvml.NVML_ERROR_TIMEOUT: "the driver timed out",
    pynvml.NVML_ERROR_UNKNOWN: "unknown driver error",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not supported by this device",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old to tell",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU needs a reset",
    pynvml.NVML_ERROR_IRQ_ISSUE: "the GPU's interrupts do not arrive",
    pynvml.NVML_ERROR_UNINITIALIZED: "the driver was shut down",
}
_HBM = frozenset(
    [
        "A100",
        "A30",
        "A800",
        "H100",
        "H200",
        "H800",
        "H20",
        "GH200",
        "B100",
        "B200",
        "B300",
        "GB200",
        "GB300",
        "V100",
        "P100",
    ]
)
"""Words in a product name that mean HBM."""

SLICE = "MIG-"
"""The beginning of a slice's UUID."""


class Nvidia:
    """Keeps NVML open between readings, and opens it again after a failure."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._open = False

    def read(self) -> tuple[list[DeviceReading], list[str]]:
        """The devices a CUDA program would see, in CUDA's order, and the reasons for
        missing ones.
        """
        try:
            if not self._open:
                pynvml.nvmlInit()
                self._open = True
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self.close()
            return [], [f"NVIDIA: {reason(error)}"]
        if count == 0:
            return [], ["NVIDIA: the driver is loaded but sees no GPU"]
        setting = self._environment.get("CUDA_VISIBLE_DEVICES")
        if setting is not None and setting.strip().startswith(SLICE):
            return [read_slice(setting.split(",")[0].strip(), "cuda:0")], []
        identifiers = [_identifier(index) for index in range(count)]
        order, note = visible_order(identifiers, setting, "CUDA_VISIBLE_DEVICES")
        readings = [read_device(index, f"cuda:{place}") for place, index in enumerate(order)]
        notes = [f"NVIDIA: {note}"] if note else []
        notes += [
            f"NVIDIA: GPU {index} is divided into slices (MIG), of which CUDA sees one; name it with "
            f"CUDA_VISIBLE_DEVICES={SLICE}… (nvidia-smi -L lists them)"
            for index in order
            if _is_divided(index)
        ]
        by_speed = self._environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        if by_speed and len({reading.name for reading in readings}) > 1:
            notes.append(
                "NVIDIA: different GPUs; CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA number them as here"
            )
        return readings, notes

    def close(self) -> None:
        if self._open:
            self._open = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                return


def reason(error: pynvml.NVMLError) -> str:
    """An NVML error as text, with the driver's error number."""
    code = getattr(error, "value", None)
    known = _REASONS.get(code)
    if known is None:
        known = clean_line(str(error), 120)
    return f"{known} [NVML {code}]" if code != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND else known


def read_device(index: int, identifier: str) -> DeviceReading:
    """One device. `index` is NVML's index, `identifier` is the name that plans use."""
    handle = _ask(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    return _read(handle, f"NVIDIA GPU {index}", identifier)


def read_slice(uuid: str, identifier: str) -> DeviceReading:
    """A slice of a card (MIG). A program sees one slice at most, as the first GPU. (NVIDIA Multi-Instance GPU User Guide,
    "Device Enumeration".)"""
    handle = _ask(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
    return _read(handle, clean_line(uuid, 60), identifier)


def _read(handle: Any, unnamed: str, identifier: str) -> DeviceReading:
    """The device of a handle, which may be `Missing`; `unnamed` is its name if the driver tells none."""
    if isinstance(handle, Missing):
        return DeviceReading(
            id=identifier,
            name=unnamed,
            kind="gpu",
            memory_label="VRAM",
            total_bytes=handle,
            used_bytes=handle,
            free_bytes=handle,
            utilization_percent=handle,
            temperature_celsius=handle,
            power_watts=handle,
            source="NVML",
        )
    name = _ask(lambda: _text(pynvml.nvmlDeviceGetName(handle)))
    label = unnamed if isinstance(name, Missing) else clean_line(name, 120)
    memory = _ask(lambda: _memory(handle))
    return DeviceReading(
        id=identifier,
        name=label,
        kind="gpu",
        memory_label="HBM" if _HBM & set(re.split(r"[\s-]+", label)) else "VRAM",
        total_bytes=memory if isinstance(memory, Missing) else int(memory.total),
        used_bytes=memory if isinstance(memory, Missing) else int(memory.used),
        free_bytes=memory if isinstance(memory, Missing) else int(memory.free),
        utilization_percent=_ask(lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        temperature_celsius=_ask(
            lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
        ),
        power_watts=_ask(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0),
        processes=_processes(handle),
        source="NVML",
    )


def _ask(question: Callable[[], _Value]) -> _Value | Missing:
    try:
        return question()
    except pynvml.NVMLError as error:
        return Missing(reason(error))


def _memory(handle: Any) -> Any:
    """The device's memory. Version 2 separates what the driver reserves; old drivers lack it."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_ArgumentVersionMismatch,
        pynvml.NVMLError_InvalidArgument,
    ):
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _processes(handle: Any) -> tuple[Process, ...]:
    by_pid: dict[int, Process] = {}
    for kind in ("Compute", "Graphics"):
        entries = _running(handle, kind)
        for entry in entries:
            used = entry.usedGpuMemory
            by_pid[entry.pid] = Process(
                pid=entry.pid,
                name=_process_name(entry.pid),
                used_bytes=Missing("not reported by the driver here")
                if used is None
                else int(used),
            )
    return tuple(by_pid.values())


def _running(handle: Any, kind: str) -> list[Any]:
    """The processes of one kind, from the newest call the driver has; empty if it has none."""
    for version in ("_v3", "_v2"):
        try:
            return list(getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses{version}")(handle))
        except pynvml.NVMLError_FunctionNotFound:
            continue
        except pynvml.NVMLError:
            break
    return []


def _process_name(pid: int) -> str:
    try:
        return clean_line(psutil.Process(pid).name(), 80)
    except (psutil.Error, OSError):
        return "process not visible here"


def _identifier(index: int) -> str:
    """The UUID that CUDA_VISIBLE_DEVICES may contain; empty if the driver fails."""
    try:
        return _text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
    except pynvml.NVMLError:
        return ""


def _is_divided(index: int) -> bool:
    """Whether a card is in MIG mode."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
