"""`memconsole devices`: the devices of this machine and how full they are."""

from __future__ import annotations

import json as json_module
import time

import click
import msgspec

from memconsole.cli.machine.reading import read_devices
from memconsole.cli.tables import columns
from memconsole.devices.probe import read_once
from memconsole.devices.reading import Bytes, Devices, Missing, Number
from memconsole.units import format_bytes

WATCH_SECONDS = 5.0
"""The most that each further reading takes; a driver that hangs then shows as n/a."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per reading.")
@click.option("--watch", is_flag=True, help="Print a reading every second until interrupted.")
def command(as_json: bool, watch: bool) -> None:
    """List devices with memory, utilization, temperature and power, and the reason for each n/a."""
    found = read_devices()
    while True:
        if as_json:
            click.echo(json_module.dumps(msgspec.to_builtins(found), indent=None if watch else 2))
        else:
            click.echo(text(found))
        if not watch:
            return
        try:
            time.sleep(1.0)
            found = read_once(WATCH_SECONDS)
        except KeyboardInterrupt:
            return


def text(found: Devices) -> str:
    """One line per device, then the reasons for missing numbers."""
    rows = [["device", "name", "memory", "used", "free", "total", "busy", "temperature", "power"]]
    reasons: dict[str, None] = {}
    for device in found.devices:
        cells = [device.id, device.name, device.memory_label]
        for value in (device.used_bytes, device.free_bytes, device.total_bytes):
            cells.append("n/a" if isinstance(value, Missing) else format_bytes(value))
        for number, unit in (
            (device.utilization_percent, " %"),
            (device.temperature_celsius, " °C"),
            (device.power_watts, " W"),
        ):
            cells.append("n/a" if isinstance(number, Missing) else f"{number:.0f}{unit}")
        values: tuple[Bytes | Number, ...] = (
            device.used_bytes, device.free_bytes, device.total_bytes,
            device.utilization_percent, device.temperature_celsius, device.power_watts,
        )  # fmt: skip
        for missing in values:
            if isinstance(missing, Missing):
                reasons[f"{device.id}: {missing.reason}"] = None
        rows.append(cells)
    lines = columns(rows, left=(0, 1, 2))
    lines += [f"n/a  {reason}" for reason in reasons]
    lines += list(found.notes)
    return "\n".join(lines)
