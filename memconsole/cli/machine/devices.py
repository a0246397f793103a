"""`memconsole devices`: the devices of this machine and how full they are."""

from __future__ import annotations

import json as json_module
import time

import click
import msgspec

from memconsole.cli.machine.reading import read_devices
from memconsole.cli.tables import columns
from memconsole.devices.probe import read_once
from memconsole.devices.reading import Devices, Missing
from memconsole.units import format_bytes

WATCH_SECONDS = 5.0
"""The most that each further reading takes; a driver that hangs then shows as n/a."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per reading.")
@click.option("--watch", is_flag=True, help="Print a reading every second until interrupted.")
def command(as_json: bool, watch: bool) -> None:
    """List devices with memory, utilization, temperature and power, and the reason for each n/a."""
    devices = read_devices()
    while True:
        if as_json:
            click.echo(json_module.dumps(msgspec.to_builtins(devices), indent=None if watch else 2))
        else:
            click.echo(text(devices))
        if not watch:
            return
        try:
            time.sleep(1.0)
            devices = read_once(WATCH_SECONDS)
        except KeyboardInterrupt:
            return


def text(devices: Devices) -> str:
    """One line per device, then the reasons for missing numbers."""
    rows = [["device", "name", "memory", "used", "free", "total", "busy", "temperature", "power"]]
    reasons: dict[str, None] = {}
    for device in devices.devices:
        sizes = (device.used_bytes, device.free_bytes, device.total_bytes)
        numbers = (
            (device.utilization_percent, " %"),
            (device.temperature_celsius, " °C"),
            (device.power_watts, " W"),
        )
        rows.append(
            [
                device.id,
                device.name,
                device.memory_label,
                *("n/a" if isinstance(size, Missing) else format_bytes(size) for size in sizes),
                *(
                    "n/a" if isinstance(number, Missing) else f"{number:.0f}{unit}"
                    for number, unit in numbers
                ),
            ]
        )
        for value in (*sizes, *(number for number, _ in numbers)):
            if isinstance(value, Missing):
                reasons[f"{device.id}: {value.reason}"] = None
    lines = columns(rows, left=(0, 1, 2))
    lines += [f"n/a  {reason}" for reason in reasons]
    lines += list(devices.notes)
    return "\n".join(lines)
