"""F21: whatever a driver does, the console learns the reason and never waits for it."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from fake_driver import build

from memconsole.cli.machine import reading as commands
from memconsole.devices.budget import DevicesUnknown, budget
from memconsole.devices.probe import Probe, read_once
from memconsole.devices.reading import DeviceReading, Devices, Missing
from memconsole.plan.plan import Plan, PlanError, apply_settings


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder holding the fake ``libnvidia-ml.so.1``."""
    folder = tmp_path_factory.mktemp("nvml")
    if not build("nvml", folder):
        pytest.skip("no C compiler: the fake NVIDIA library cannot be built")
    return folder


def faulty(library: Path, what: str, at: str) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return environment | {
        "LD_LIBRARY_PATH": str(library),
        "FAKE_NVML": what,
        "FAKE_NVML_AT": at,
    }


def wait_for(probe: Probe, wanted: Callable[[Devices], bool], seconds: float = 60.0) -> Devices:
    """The first reading that is as wanted. Every look is timed: it must not wait for the probe."""
    deadline = time.monotonic() + seconds
    looks: list[float] = []
    while time.monotonic() < deadline:
        begin = time.perf_counter()
        latest = probe.latest()
        looks.append(time.perf_counter() - begin)
        if latest is not None and wanted(latest):
            # The median, since a busy machine may hold up any single look. A hung driver takes far longer.
            assert statistics.median(looks) < 1.0
            return latest
        time.sleep(0.02)
    raise AssertionError(f"not seen within {seconds} s; last reading: {probe.latest()}")


def gpu(devices: Devices) -> DeviceReading | None:
    return next((device for device in devices.devices if device.kind == "gpu"), None)


def host_has_numbers(devices: Devices) -> bool:
    host = next((device for device in devices.devices if device.kind == "cpu"), None)
    return host is not None and isinstance(host.free_bytes, int)


def noted(devices: Devices, words: str) -> bool:
    return any(words in note for note in devices.notes)


def test_a_working_driver_is_read(library: Path) -> None:
    devices = read_once(20.0, environment=faulty(library, "ok", "init"))
    reading = gpu(devices)
    assert reading is not None
    assert (reading.id, reading.name, reading.memory_label) == (
        "cuda:0",
        "NVIDIA GeForce RTX 3060",
        "VRAM",
    )
    assert (reading.total_bytes, reading.used_bytes) == (12288 << 20, 2048 << 20)
    assert (reading.utilization_percent, reading.temperature_celsius) == (37.0, 61.0)
    (process,) = reading.processes
    assert process.used_bytes == 1024 << 20
    assert process.name.startswith("python")
    assert reading.power_watts == Missing("not supported by this device [NVML 3]")


WATCHED = """
import os, sys
from memconsole.devices.sampler import main

ACTS = ("os.exec", "os.fork", "os.posix_spawn", "os.system", "subprocess.Popen", "socket.connect",
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.kill")

def heard(event, arguments):
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    if writes or event in ACTS:
        os.write(1, f"{event} {arguments}".encode())
        os._exit(1)

sys.addaudithook(heard)
main(["--once", "--until=" + sys.argv[1]])
"""


def test_the_probe_of_a_read_only_console_only_reads(library: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-B", "-c", WATCHED, str(time.monotonic() + 20)],
        env=faulty(library, "ok", "init"),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert gpu(msgspec.json.decode(done.stdout, type=Devices)) is not None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("9", "driver not loaded"),
        ("18", "versions differ"),
        ("15", "GPU lost"),
        ("10", "timed out"),
        ("999", "unknown driver error"),
    ],
)
def test_an_error_of_the_driver_is_shown_with_its_reason(
    library: Path, code: str, reason: str
) -> None:
    devices = read_once(20.0, environment=faulty(library, code, "init"))
    assert gpu(devices) is None
    assert noted(devices, reason)
    assert noted(devices, f"[NVML {code}]")
    assert host_has_numbers(devices)


@pytest.mark.parametrize(("code", "reason"), [("15", "GPU lost"), ("10", "timed out")])
def test_a_device_that_fails_keeps_its_other_numbers_and_the_reason(
    library: Path, code: str, reason: str
) -> None:
    devices = read_once(20.0, environment=faulty(library, code, "device"))
    reading = gpu(devices)
    assert reading is not None
    assert isinstance(reading.used_bytes, Missing)
    assert reason in reading.used_bytes.reason
    assert reading.temperature_celsius == 61.0
    with pytest.raises(PlanError, match=reason):
        budget(apply_settings(Plan(), ["device.name=cuda:0"]), devices)


def test_no_driver_is_an_ordinary_case(tmp_path: Path) -> None:
    environment = dict(os.environ) | {"LD_LIBRARY_PATH": str(tmp_path)}
    devices = read_once(20.0, environment=environment)
    if gpu(devices) is not None:
        pytest.skip("this machine has a working NVIDIA driver")
    assert noted(devices, "NVIDIA: ")
    assert host_has_numbers(devices)


@pytest.mark.parametrize("at", ["init", "device"])
def test_a_hanging_driver_costs_only_its_own_gauges(library: Path, at: str) -> None:
    with Probe(0.2, environment=faulty(library, "hang", at)) as probe:
        devices = wait_for(probe, lambda d: noted(d, "NVIDIA: the driver has not answered"))
        assert host_has_numbers(devices)
        wait_for(probe, lambda d: d is not devices)
        assert probe.restarts == 0


def test_one_reading_of_a_hanging_driver_ends_in_time_and_names_it(library: Path) -> None:
    devices = read_once(4.0, environment=faulty(library, "hang", "init"))
    assert noted(devices, "has not answered")
    assert devices.unanswered == ("NVIDIA",)
    assert host_has_numbers(devices)
    with pytest.raises(DevicesUnknown, match="the driver has not answered for"):
        budget(apply_settings(Plan(), ["device.name=cuda:0"]), devices)


def test_a_command_waits_for_a_slow_driver_and_says_so(
    library: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in faulty(library, "slow", "init").items():
        monkeypatch.setenv(name, value)
    plan = apply_settings(Plan(), ["device.name=cuda:0"])
    devices = commands.read_devices(plan)
    assert budget(plan, devices).kind == "gpu"
    assert devices.unanswered == ()
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err == "memconsole: waiting for the device drivers, 30 s at most\n"


def test_a_command_that_needs_no_driver_does_not_wait_long(
    library: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in faulty(library, "hang", "init").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(commands, "QUIET_SECONDS", 0.5)
    begun = time.monotonic()
    devices = commands.read_devices(apply_settings(Plan(), ["device.name=cpu"]))
    assert time.monotonic() - begun < commands.ONCE_SECONDS / 2
    assert host_has_numbers(devices)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("at", ["init", "device"])
def test_a_crashing_driver_is_named_and_the_other_gauges_go_on(library: Path, at: str) -> None:
    with Probe(0.2, environment=faulty(library, "segfault", at), retry_seconds=0.5) as probe:
        devices = wait_for(probe, lambda d: noted(d, "SIGSEGV") and host_has_numbers(d))
        assert noted(devices, "NVIDIA: a driver call crashed the probe (SIGSEGV)")
        assert gpu(devices) is None
        # It is asked again after a while, and crashes again.
        wait_for(probe, lambda _: probe.restarts >= 2)
        wait_for(probe, lambda d: noted(d, "SIGSEGV") and host_has_numbers(d))


def test_one_reading_of_a_crashing_driver_has_the_host(library: Path) -> None:
    devices = read_once(20.0, environment=faulty(library, "segfault", "init"))
    assert noted(devices, "SIGSEGV")
    assert host_has_numbers(devices)


def test_a_probe_that_is_stopped_is_told_then_replaced_and_leaves_no_zombie() -> None:
    with Probe(0.1, hung_seconds=6.0) as probe:
        wait_for(probe, host_has_numbers)
        pid = probe.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        wait_for(probe, lambda d: noted(d, "silent for"))
        wait_for(probe, lambda _: probe.restarts >= 1)
        wait_for(probe, lambda d: not noted(d, "silent for") and host_has_numbers(d))
        assert not psutil.pid_exists(pid)


def test_a_killed_probe_is_started_again() -> None:
    with Probe(0.1) as probe:
        wait_for(probe, host_has_numbers)
        pid = probe.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(probe, lambda _: probe.restarts == 1 and probe.pid not in (None, pid))
        wait_for(probe, lambda d: not noted(d, "was killed") and host_has_numbers(d))
        assert not psutil.pid_exists(pid)


def test_closing_ends_the_process_even_while_its_driver_hangs(library: Path) -> None:
    probe = Probe(0.2, environment=faulty(library, "hang", "init"))
    probe.start()
    wait_for(probe, lambda d: bool(d.devices))
    pid = probe.pid
    assert pid is not None
    probe.close()
    assert not psutil.pid_exists(pid)


def test_the_probe_ends_when_its_console_is_killed() -> None:
    script = (
        "import time\n"
        "from memconsole.devices.probe import Probe\n"
        "p = Probe(0.1); p.start()\n"
        "while p.latest() is None: time.sleep(0.02)\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    console = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert console.stdout is not None
    pid = int(console.stdout.readline())
    console.kill()
    console.wait()
    console.stdout.close()
    deadline = time.monotonic() + 30
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("what", "at", "answer"),
    [("ok", "init", f"[{1 << 30}] True"), ("999", "init", "[] True"), ("hang", "init", "[] False")],
)
def test_a_trainer_reads_its_own_bytes_and_never_waits_for_the_driver_to_open(
    library: Path, what: str, at: str, answer: str
) -> None:
    program = """
import time
from memconsole_trainer.host.gpu_memory import GpuMemory
memory = GpuMemory("12")
memory.begin()
deadline = time.monotonic() + LIMIT
while not memory.alone and time.monotonic() < deadline:
    time.sleep(0.01)
print(memory.charged(), memory.alone)
"""
    environment = faulty(library, what, at)
    command = [sys.executable, "-c", program.replace("LIMIT", "1" if what == "hang" else "60")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (found.stdout.strip(), found.returncode) == (answer, 0), found.stderr
