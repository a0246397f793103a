"""The probe process: reads all devices, asking each driver in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

import msgspec

from memconsole.devices.amd import read_amd
from memconsole.devices.apple import read_apple
from memconsole.devices.host import Host
from memconsole.devices.reading import DeviceReading, Devices, without_numbers
from memconsole.devices.tpu import read_tpu

Readings = tuple[list[DeviceReading], list[str]]

FIRST_PATIENCE_SECONDS = 1.5
"""A driver that has to wake a GPU may take about a second for its first answer."""
PATIENCE_SECONDS = 0.25
PRIME_SECONDS = 0.1
SILENCE_SECONDS = 2.0
"""If a driver does not answer for this long, that is reported and its old numbers are dropped."""


class DriverThread:
    """Asks one driver in a thread of its own, repeatedly, and never waits longer than allowed for an answer."""

    def __init__(self, label: str, read: Callable[[], Readings]) -> None:
        self.label = label
        self.unanswered = False
        """Whether `latest` has waited in vain."""
        self._read = read
        self._answer: Readings = ([], [])
        self._asked = 0.0
        self._question, self._answered = threading.Event(), threading.Event()
        self._answered.set()
        threading.Thread(target=self._answer_questions, name=label, daemon=True).start()

    def ask(self) -> None:
        """Ask the driver, unless the last question is still unanswered."""
        if self._answered.is_set():
            self._asked = time.monotonic()
            self._answered.clear()
            self._question.set()

    def latest(self, deadline: float) -> Readings:
        """The newest answer. Waits for an unanswered question until `deadline` (monotonic)."""
        self.unanswered = not self._answered.wait(max(0.0, deadline - time.monotonic()))
        if not self.unanswered:
            return self._answer
        readings = self._answer[0]
        silent = time.monotonic() - self._asked
        if silent < SILENCE_SECONDS and readings:
            return self._answer
        why = f"the driver has not answered for {silent:.0f} s"
        return [without_numbers(r, why) for r in readings], [f"{self.label}: {why}"]

    def _answer_questions(self) -> None:
        while True:
            self._question.wait()
            self._question.clear()
            try:
                self._answer = self._read()
            except Exception as error:  # noqa: BLE001 (reported in the notes)
                self._answer = ([], [f"{self.label}: {type(error).__name__}: {error}"])
            self._answered.set()


class Sampler:
    """Samples the host and all device drivers."""

    def __init__(self, without_nvidia: str = "") -> None:
        """`without_nvidia`: why the NVIDIA driver is not asked; empty to ask it."""
        self._host = Host()
        self._without_nvidia = without_nvidia
        self._nvidia = None if without_nvidia else DriverThread("NVIDIA", _ask_nvidia())
        self._amd = DriverThread("AMD", lambda: read_amd(os.environ, first=self._nvidia_count))
        self._nvidia_count = 0

    def prime(self) -> None:
        """Start the interval over which the first sample measures the processor's utilization."""
        self._host.read()
        time.sleep(PRIME_SECONDS)

    def sample(self, patience_seconds: float) -> Devices:
        """One reading of everything, within about `patience_seconds`."""
        deadline = time.monotonic() + patience_seconds
        if self._nvidia:
            self._nvidia.ask()
        self._amd.ask()
        host, host_notes = self._host.read()
        if self._nvidia:
            readings, notes = self._nvidia.latest(deadline)
        else:
            readings, notes = [], [f"NVIDIA: {self._without_nvidia}"]
        self._nvidia_count = len(readings)
        for more, reasons in (
            self._amd.latest(deadline),
            read_apple(),
            read_tpu(os.environ),
        ):
            readings, notes = readings + more, notes + reasons
        return Devices(
            devices=(*readings, host),
            notes=(*notes, *host_notes),
            unanswered=tuple(
                driver.label
                for driver in (self._nvidia, self._amd)
                if driver is not None and driver.unanswered
            ),
        )


def main(arguments: list[str]) -> None:
    """Print one line per interval, or a single line with --once."""
    options = dict(argument.lstrip("-").partition("=")[::2] for argument in arguments)
    sampler = Sampler(options.get("without-nvidia", ""))
    if "once" in options:
        sampler.prime()
        until = float(options.get("until") or time.monotonic() + FIRST_PATIENCE_SECONDS)
        _print(sampler.sample(until - time.monotonic()))
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_input, daemon=True).start()
    parent = os.getppid()
    interval = float(options.get("interval") or 1.0)
    patience, following = FIRST_PATIENCE_SECONDS, time.monotonic()
    while os.getppid() == parent:
        _print(sampler.sample(patience))
        patience = PATIENCE_SECONDS
        following = max(following + interval, time.monotonic() + interval / 4)
        time.sleep(following - time.monotonic())
    os._exit(0)


def _ask_nvidia() -> Callable[[], Readings]:
    """A function that reads NVIDIA devices.

    It imports NVML on its first call, in the driver's thread, because loading the library can already
    hang or crash.
    """
    opened: list[Callable[[], Readings]] = []

    def ask() -> Readings:
        if not opened:
            try:
                from memconsole.devices.nvidia import Nvidia
            except ImportError as error:
                return [], [f"NVIDIA: nvidia-ml-py cannot be imported ({error})"]
            opened.append(Nvidia(os.environ).read)
        return opened[0]()

    return ask


def _end_with_input() -> None:
    """Exit when the console is gone. A driver's thread cannot delay this."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(0)


def _print(devices: Devices) -> None:
    line = msgspec.json.encode(devices) + b"\n"
    try:
        while line:
            line = line[os.write(1, line) :]
    except OSError:
        os._exit(0)
