"""Reads AMD devices from the sysfs files of the amdgpu kernel driver.

Source: Linux kernel documentation, "drm/amdgpu AMDgpu driver": "Memory usage and display of memory
info", "GPU Power/Thermal Controls and Monitoring". hwmon units are millidegrees and microwatts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from memconsole.devices.reading import DeviceReading, Missing
from memconsole.devices.visible import visible_order
from memconsole.sanitize import clean_line

AMD_VENDOR = "0x1002"
_NAMES = Path("usr/share/libdrm/amdgpu.ids")


def read_amd(
    environment: Mapping[str, str], root: Path = Path("/"), first: int = 0
) -> tuple[list[DeviceReading], list[str]]:
    """The devices a ROCm program would see, numbered from `first`, and notes on what is missing.

    `root` is the root of the file system. Never raises.
    """
    cards = _cards(root / "sys")
    if not cards:
        return [], ["AMD: no amdgpu device"]
    notes = []
    if not (root / "dev" / "kfd").exists():
        notes.append("AMD: no /dev/kfd, so ROCm cannot compute here")
    order, hidden = list(range(len(cards))), ""
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if variable in environment:
            identifiers = [f"GPU-{_text(card / 'unique_id')}" for card in cards]
            order, hidden = visible_order(identifiers, environment[variable], variable)
            break
    if hidden:
        notes.append(f"AMD: {hidden}")
    return [
        read_card(cards[index], f"cuda:{first + place}", root) for place, index in enumerate(order)
    ], notes


def read_card(device: Path, identifier: str, root: Path) -> DeviceReading:
    """One device from its sysfs directory ``/sys/class/drm/cardN/device``."""
    total = _number(device / "mem_info_vram_total")
    used = _number(device / "mem_info_vram_used")
    free: int | Missing
    if isinstance(total, Missing):
        free = total
    elif isinstance(used, Missing):
        free = used
    else:
        free = max(0, total - used)
    name = _name(device, root)
    return DeviceReading(
        id=identifier,
        name=name,
        kind="rocm",
        memory_label="HBM" if "Instinct" in name else "VRAM",
        total_bytes=total,
        used_bytes=used,
        free_bytes=free,
        utilization_percent=_scaled(_number(device / "gpu_busy_percent"), 1.0),
        temperature_celsius=_scaled(_hwmon(device, "temp1_input"), 1e-3),
        power_watts=_scaled(_hwmon(device, "power1_average", "power1_input"), 1e-6),
        source="amdgpu sysfs",
    )


def _cards(sys: Path) -> list[Path]:
    """The device directory of every AMD card, in the order of bus addresses."""
    by_address: dict[str, Path] = {}
    for card in sys.glob("class/drm/card*"):
        device = card / "device"
        if re.fullmatch(r"card\d+", card.name) and _text(device / "vendor") == AMD_VENDOR:
            slot = re.search(r"PCI_SLOT_NAME=(\S+)", _text(device / "uevent"))
            address = slot[1] if slot else f"~{int(card.name[4:]):06d}"
            by_address[address] = device
    return [by_address[address] for address in sorted(by_address)]


def _name(device: Path, root: Path) -> str:
    product = _text(device / "product_name")
    if product:
        return clean_line(product, 120)
    chip = _text(device / "device").removeprefix("0x").upper()
    revision = _text(device / "revision").removeprefix("0x").upper()
    for line in _text(root / _NAMES).splitlines():
        fields = [field.strip() for field in line.split(",", 2)]
        if fields[:2] == [chip, revision]:
            return clean_line(fields[2], 120)
    return f"AMD GPU {chip or 'of unknown type'}"


def _hwmon(device: Path, *names: str) -> int | Missing:
    value: int | Missing = Missing("the driver offers no sensor")
    for folder in sorted(device.glob("hwmon/hwmon*")):
        for name in names:
            value = _number(folder / name)
            if not isinstance(value, Missing):
                return value
    return value


def _number(path: Path) -> int | Missing:
    """The number in a sysfs file. A suspended or lost device answers with an error."""
    try:
        return int(path.read_text(encoding="ascii").strip())
    except FileNotFoundError:
        return Missing(f"the driver offers no {path.name}")
    except OSError as error:
        return Missing(f"{path.name}: {error.strerror}")
    except ValueError:
        return Missing(f"{path.name}: not a number")


def _scaled(value: int | Missing, factor: float) -> float | Missing:
    return value if isinstance(value, Missing) else value * factor


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
