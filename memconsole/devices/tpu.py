"""Finds the TPUs of this machine. Only the process that owns one can tell how full it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from memconsole.devices.reading import DeviceReading, Missing
from memconsole.sanitize import clean_line

GOOGLE_VENDOR = "0x1ae0"
GENERATIONS = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}
"""PCI device ids. v2 and v3 share one. Source: jax/_src/hardware_utils.py."""
_TYPES = (
    (re.compile(r"v5litepod|v5e", re.I), "v5e"),
    (re.compile(r"v5p", re.I), "v5p"),
    (re.compile(r"v6e", re.I), "v6e"),
    (re.compile(r"(?:tpu|v)7x?", re.I), "7x"),
    (re.compile(r"v([234])", re.I), ""),
)
_ONE_OWNER = Missing("only the process that owns the TPU can tell; a running trainer reports it")


def read_tpu(
    environment: Mapping[str, str], root: Path = Path("/")
) -> tuple[list[DeviceReading], list[str]]:
    """One reading for each chip that the PCI bus or a device node shows, and notes on what is missing.
    TPU_ACCELERATOR_TYPE alone makes no reading."""
    chips = _chips(root)
    nodes = sorted(path.name for path in root.glob("dev/accel[0-9]*"))
    nodes += sorted(path.name for path in root.glob("dev/vfio/[0-9]*")) if chips else []
    declared = environment.get("TPU_ACCELERATOR_TYPE", "")
    count = len(chips) or len(nodes)
    if not count:
        if declared:
            shown = clean_line(declared, 40)
            return [], [f"TPU: TPU_ACCELERATOR_TYPE is {shown} but there is no TPU device here"]
        return [], []
    notes = (
        [] if nodes else ["TPU: on the PCI bus, but it has no /dev/accel* or /dev/vfio/* to open"]
    )
    generation = chips[0] if chips and declared[:2] != "v2" else _declared(declared)
    name = f"TPU {generation}" if generation else "TPU of unknown type"
    return [
        DeviceReading(
            id=f"tpu:{index}",
            name=name,
            kind="tpu",
            memory_label="HBM",
            total_bytes=_ONE_OWNER,
            used_bytes=_ONE_OWNER,
            free_bytes=_ONE_OWNER,
            utilization_percent=_ONE_OWNER,
            temperature_celsius=_ONE_OWNER,
            power_watts=_ONE_OWNER,
            source="PCI bus" if chips else "device nodes",
        )
        for index in range(count)
    ], notes


def _chips(root: Path) -> list[str]:
    """The generation of every TPU on the PCI bus."""
    generations = []
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        try:
            if vendor.read_text().strip() != GOOGLE_VENDOR:
                continue
            device = (vendor.parent / "device").read_text().strip()
        except OSError:
            continue
        if device in GENERATIONS:
            generations.append(GENERATIONS[device])
    return generations


def _declared(accelerator_type: str) -> str:
    """The generation in a type such as ``v5litepod-8``, ``v4-8`` or ``v6e-1``; empty if unknown."""
    for pattern, generation in _TYPES:
        match = pattern.match(accelerator_type)
        if match:
            return generation or f"v{match[1]}"
    return ""
