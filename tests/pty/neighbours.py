"""memconsole's devices screen beside nvitop and other monitors: one terminal, the same cards, one after the other.

`bar.py` prints this at its end; `python tests/pty/neighbours.py` prints it alone. Monitors are looked for
on the PATH. Where no NVIDIA driver is, a stand-in shows busy cards to all (tests/data/fake_nvml/busy.c).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from fake_driver import build
from measure import environment, opened, resident_mib, used

from memconsole.devices.probe import read_once

OURS = "memconsole"
CARDS = (1, 8)
"""How many the stand-in shows."""
SECONDS = 15.0
SETTLING_SECONDS = 4.0
SCREENS = {
    OURS: r"(?s)cuda:0.*GiB", "nvitop": r"GiB /", "nvtop": r"%", "btop": r"%", "htop": r"%",
}  # fmt: skip
"""Monitor → what is on its screen once that shows memory."""


@dataclass(frozen=True)
class Figures:
    """One monitor at 80x24. Memory and processor time are with its child processes."""

    shown_seconds: float
    bytes_per_second: float
    cpu_share: float
    rss_mib: float


COLUMNS = (
    ("cards shown after", "{:.2f} s"), ("bytes", "{:,.0f} B/s"), ("processor", "{:.1%} of a core"),
    ("memory", "{:.0f} MiB"),
)  # fmt: skip
"""Heading and format of each of `Figures`."""


@dataclass(frozen=True)
class Comparison:
    """The monitors over the same cards; `simulated` where a stand-in shows these."""

    cards: int
    simulated: bool
    monitors: dict[str, Figures]


def compare(env: Mapping[str, str], seconds: float = SECONDS) -> list[Comparison]:
    """Every installed monitor and memconsole; none where there is neither a driver nor a compiler."""
    real = sum(device.source == "NVML" for device in read_once(5.0).devices)
    if real:
        return [Comparison(real, False, _monitors(env, seconds))]
    with tempfile.TemporaryDirectory() as folder:
        if not build("busy", Path(folder)):
            return []
        found = []
        for cards in CARDS:
            shown = {"FAKE_NVML_CARDS": str(cards), "FAKE_NVML_PID": str(os.getpid())}
            fake = {**env, **shown, "LD_LIBRARY_PATH": folder}
            found.append(Comparison(cards, True, _monitors(fake, seconds)))
        return found


def _monitors(env: Mapping[str, str], seconds: float) -> dict[str, Figures]:
    return {
        name: _measured(env, name, command, seconds)
        for name in SCREENS
        if (command := _command(name)) is not None
    }


def _command(name: str) -> list[str] | None:
    if name == OURS:
        return [sys.executable, "-m", "memconsole"]
    path = shutil.which(name)
    return None if path is None else [path]


def _measured(env: Mapping[str, str], name: str, command: list[str], seconds: float) -> Figures:
    """Of a second start, from a warm disk.

    memconsole opens on the plan; as soon as that is there, `r` leaves tracing the plan's step, which no
    other monitor does, and `g` shows the devices.
    """
    _until_shown(env, name, command, 0.0)
    return _until_shown(env, name, command, seconds)


def _until_shown(env: Mapping[str, str], name: str, command: list[str], seconds: float) -> Figures:
    begun = time.monotonic()
    with opened(env, command=command) as terminal:
        if name == OURS:
            terminal.wait_for("optimizations", 60)
            terminal.send("rg")
        terminal.wait_for(SCREENS[name], 60)
        shown = time.monotonic() - begun
        time.sleep(SETTLING_SECONDS if seconds else 0)
        rate, share, _ = used(terminal, seconds)
        return Figures(shown, rate, share, resident_mib(terminal.process.pid))


def told(comparisons: list[Comparison]) -> list[str]:
    """A row per monitor, those of others with their multiple of ours."""
    lines = []
    for one in comparisons:
        cards = f"{one.cards} {'simulated ' if one.simulated else ''}{'card' if one.cards == 1 else 'cards'}"
        lines.append(f"{cards + ', 80x24':28}" + "".join(f"{head:>24}" for head, _ in COLUMNS))
        ours = astuple(one.monitors[OURS])
        for name, figures in one.monitors.items():
            cells = []
            for (_, unit), value, mine in zip(COLUMNS, astuple(figures), ours, strict=True):
                ratio = "" if name == OURS or not mine else f" x{value / mine:.2g}"
                cells.append(f"{unit.format(value) + ratio:>24}")
            lines.append(f"{name:28}" + "".join(cells))
    if not any("nvitop" in one.monitors for one in comparisons):
        lines.append(
            "nvitop is not compared: it is not on the PATH, or no compiler builds it a driver"
        )
    return lines


if __name__ == "__main__":
    with environment() as own:
        print("\n".join(told(compare(own))))
