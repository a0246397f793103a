"""What a probe reports: devices and how full they are. Every missing number has a reason."""

from __future__ import annotations

import msgspec


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """A number that could not be read, and why."""

    reason: str


Bytes = int | Missing
Number = float | Missing


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses a device."""

    pid: int
    name: str
    used_bytes: Bytes


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """One device at one moment."""

    id: str
    """The name that plans use: cpu, cuda:0, mps, tpu:0."""
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
    """All devices that one probe saw."""

    devices: tuple[DeviceReading, ...]
    notes: tuple[str, ...] = ()
    """Why a kind of device is missing, such as "NVIDIA: no driver (libnvidia-ml.so.1 not found)".
    """
    unanswered: tuple[str, ...] = ()
    """The drivers that have not answered yet, by the first word of their notes: NVIDIA, AMD, or device probe for all."""


def without_numbers(device: DeviceReading, reason: str) -> DeviceReading:
    """`device` with every changing number replaced by the reason why it is unknown."""
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


def free_later(devices: Devices, reason: str) -> Devices:
    """`devices` for a run that starts later, when other bytes will be free than now. `reason` says why they are not known."""
    return msgspec.structs.replace(
        devices,
        devices=tuple(
            msgspec.structs.replace(device, free_bytes=Missing(reason))
            for device in devices.devices
        ),
    )
