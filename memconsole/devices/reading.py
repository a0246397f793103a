"""What a probe reports: devices and how full they are, every missing number with its reason."""

from __future__ import annotations

import msgspec


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """A number that could not be had."""

    reason: str


Bytes = int | Missing
Number = float | Missing


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process using a device."""

    pid: int
    name: str
    used_bytes: Bytes


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """One device at one moment."""

    id: str
    """As a plan names it: cpu, cuda:0, mps, tpu:0."""
    name: str
    kind: str
    """cpu | gpu | rocm | apple | tpu"""
    memory_label: str
    """VRAM | HBM | unified memory | host RAM"""
    total_bytes: Bytes
    used_bytes: Bytes
    free_bytes: Bytes
    utilization_percent: Number
    temperature_celsius: Number
    power_watts: Number
    processes: tuple[Process, ...] = ()
    source: str = ""
    """NVML, amdgpu sysfs, psutil, trainer …"""


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one probe saw."""

    devices: tuple[DeviceReading, ...]
    notes: tuple[str, ...] = ()
    """Why a kind of device is absent: "NVIDIA: no driver (libnvidia-ml.so.1 not found)"."""
    taken_monotonic_seconds: float = 0.0


def without_numbers(device: DeviceReading, reason: str) -> DeviceReading:
    """`device` with every number that changes replaced by why it is not known."""
    missing = Missing(reason)
    return msgspec.structs.replace(
        device,
        used_bytes=missing,
        free_bytes=missing,
        utilization_percent=missing,
        temperature_celsius=missing,
        power_watts=missing,
        processes=(),
    )
