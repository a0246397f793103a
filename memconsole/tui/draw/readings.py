"""Pure functions that draw the probe's readings, with as much detail as there is room for."""

from __future__ import annotations

from memconsole.devices.reading import DeviceReading, Devices, Missing, Number
from memconsole.tui.draw.bars import bar
from memconsole.tui.draw.gauges import Gauge, gauge_lines
from memconsole.tui.draw.lines import Line, Span, columns, fit, left, right, rule
from memconsole.tui.draw.words import bytes_or_reason, number_or_reason
from memconsole.units import format_bytes

_TWO_COLUMNS = 110
_GAP = 3
_MOST_PROCESSES = 4


def device_lines(devices: Devices | None, width: int, height: int) -> list[Line]:
    """All readings, then the notes. The layout with most detail that fits into `height` is used.

    The layouts are a block, two rows or one row per device.
    """
    if devices is None:
        return [[Span(" reading the devices …", "dim")]]
    notes: list[Line] = []
    if not devices.devices:
        notes.append([Span(" no device was found", "warn")])
    if devices.notes:
        notes.append(rule("not here", width))
        notes += [[Span(fit(f" {note}", width), "dim")] for note in devices.notes]
    arrangements = (
        _blocks(devices, width),
        [line for reading in devices.devices for line in two_rows(reading, width)],
        [line for reading in devices.devices for line in one_row(reading, width)],
    )
    fitting = (lines for lines in arrangements if len(lines) + len(notes) <= height)
    return next(fitting, arrangements[-1]) + notes


def _blocks(devices: Devices, width: int) -> list[Line]:
    """A block per device, in two columns if they fit."""
    two = width >= _TWO_COLUMNS and len(devices.devices) > 1
    part = (width - _GAP) // 2 if two else width
    blocks = [[*reading_lines(reading, part), []] for reading in devices.devices]
    if not two:
        return [line for block in blocks for line in block]
    pairs = zip(blocks[::2], [*blocks[1::2], []], strict=False)
    return [line for pair in pairs for line in columns(*pair, _GAP, part)]


def reading_lines(reading: DeviceReading, width: int) -> list[Line]:
    """A block: the device, its gauge, its figures and its processes."""
    words = f" {reading.id}"
    about = f"  {reading.name} · {reading.kind} · {reading.source}"
    lines: list[Line] = [[Span(words, "accent"), Span(fit(about, width - len(words)), "dim")]]
    gauge = Gauge(
        label=reading.memory_label, used=reading.used_bytes, total=reading.total_bytes, zoom=False
    )
    lines += gauge_lines(gauge, width)
    lines += _facts(
        [f"{name} {number_or_reason(n, unit)}" for name, n, unit in figures(reading)], width
    )
    for process in reading.processes[:_MOST_PROCESSES]:
        size = bytes_or_reason(process.used_bytes)
        lines.append([Span(fit(f"   {process.pid:>8} {process.name}  {size}", width), "dim")])
    hidden = len(reading.processes) - _MOST_PROCESSES
    if hidden > 0:
        lines.append([Span(f"   and {hidden} more processes", "dim")])
    return lines


def two_rows(reading: DeviceReading, width: int) -> list[Line]:
    """The figures in columns; below them the name, reasons for missing numbers, and processes."""
    running = [f"{p.pid} {p.name} {bytes_or_reason(p.used_bytes)}" for p in reading.processes]
    words = " · ".join((reading.name, *_reasons(reading), *running))
    return [_row(reading, width), [Span(fit(f"   {words}", width), "dim")]]


def one_row(reading: DeviceReading, width: int) -> list[Line]:
    """The figures in columns; a second row gives the reasons for missing numbers, if any."""
    lines = [_row(reading, width)]
    if reasons := _reasons(reading):
        lines.append([Span(fit("   " + " · ".join(reasons), width), "dim")])
    return lines


def figures(reading: DeviceReading) -> tuple[tuple[str, Number, str], ...]:
    """Name, value and unit of the figures that are not memory."""
    return (
        ("use", reading.utilization_percent, "%"),
        ("temperature", reading.temperature_celsius, "°C"),
        ("power", reading.power_watts, "W"),
    )


def _row(reading: DeviceReading, width: int) -> Line:
    """``cuda:0   61.2 GiB / 79.6 GiB ▕███···▏  97 %  61 °C   652 W``."""
    used, total = reading.used_bytes, reading.total_bytes
    memory = " / ".join("n/a" if isinstance(n, Missing) else format_bytes(n) for n in (used, total))
    cells = [
        right("n/a" if isinstance(n, Missing) else f"{n:.0f} {unit}", 7)
        for _, n, unit in figures(reading)
    ]
    head = [Span(f" {left(reading.id, 7)}", "accent"), Span(right(memory, 20) + " ")]
    length = width - 8 - 21 - 2 - len("".join(cells))
    filled = [Span(" " * length)]
    if isinstance(used, int) and isinstance(total, int):
        filled = bar(float(used), float(total), length)
    return [*head, Span("▕", "dim"), *filled, Span("▏", "dim"), Span("".join(cells))]


def _reasons(reading: DeviceReading) -> list[str]:
    """Every missing number, with its reason."""
    memory = reading.used_bytes if isinstance(reading.used_bytes, Missing) else reading.total_bytes
    asked = ((reading.memory_label, memory), *((name, n) for name, n, _ in figures(reading)))
    return [f"{name} n/a — {n.reason}" for name, n in asked if isinstance(n, Missing)]


def _facts(texts: list[str], width: int) -> list[Line]:
    """Facts on one row if they fit, else one row each."""
    joined = " " + " · ".join(texts)
    if len(joined) <= width:
        return [[Span(joined, "dim")]]
    return [[Span(fit(f" {text}", width), "dim")] for text in texts]
