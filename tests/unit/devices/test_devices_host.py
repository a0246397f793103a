"""The host's memory is what the tightest control group leaves of it."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from memconsole.devices.apple import read_apple, working_set_bytes
from memconsole.devices.host import Host, host_facts, processor_name
from memconsole.devices.probe import read_once
from memconsole.devices.reading import Missing
from memconsole.devices.tpu import read_tpu
from memconsole.devices.visible import visible_order
from tests.unit.devices.cgroups import GIB, version_2, write


def test_the_reading_is_this_machine_within_its_limit(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    total = int(psutil.virtual_memory().total)
    version_2(tmp_path, "job", str(total // 2), 0, 0)
    reading, notes = Host(tmp_path).read()
    assert reading.total_bytes == total // 2
    assert isinstance(reading.free_bytes, int)
    assert 0 < reading.free_bytes <= total // 2
    assert "control group" in notes[0]


def test_utilization_is_unknown_at_the_first_reading() -> None:
    host = Host()
    assert isinstance(host.read()[0].utilization_percent, Missing)


def test_the_host_itself_has_a_name_and_memory() -> None:
    facts = host_facts()
    assert facts.processor
    assert 0 < facts.free_bytes <= facts.total_bytes


def test_the_processors_name_comes_from_cpuinfo(tmp_path: Path) -> None:
    write(tmp_path / "proc/cpuinfo", "processor : 0\nmodel name\t: AMD Ryzen 9 \x1b[1m7950X\n")
    assert processor_name(tmp_path) == "AMD Ryzen 9 7950X"


def test_apple_silicon_is_one_device_with_unified_memory() -> None:
    answers = {"machdep.cpu.brand_string": "Apple M2", "hw.memsize": str(16 * GIB)}
    (reading,), notes = read_apple("darwin", answers.get)
    assert (reading.id, reading.name, reading.kind) == ("mps", "Apple M2", "apple")
    assert reading.memory_label == "unified memory"
    assert reading.total_bytes == 16 * GIB
    assert isinstance(reading.used_bytes, Missing)
    assert notes == []


def test_other_machines_have_no_apple_gpu() -> None:
    intel = {"machdep.cpu.brand_string": "Intel(R) Core(TM) i7"}
    readings, notes = read_apple("darwin", intel.get)
    assert readings == []
    assert "Intel" in notes[0]
    assert read_apple("linux", intel.get) == ([], [])


@pytest.mark.parametrize(
    ("gibibytes", "wired", "expected"),
    [(16, "", 10922), (32, "0", 21845), (36, "", 27648), (64, "", 49152), (64, "60000", 60000)],
)
def test_the_working_set_is_what_metal_recommends(
    gibibytes: int, wired: str, expected: int
) -> None:
    found, _ = working_set_bytes(gibibytes * GIB, {"iogpu.wired_limit_mb": wired}.get)
    assert found >> 20 == expected


def tpu_tree(root: Path, device: str, chips: int, node: str) -> None:
    for index in range(chips):
        folder = root / f"sys/bus/pci/devices/0000:00:0{index + 4}.0"
        write(folder / "vendor", "0x1ae0\n")
        write(folder / "device", f"{device}\n")
        write(root / node.format(index), "")


def test_tpus_are_found_by_their_chips_and_never_told_as_empty(tmp_path: Path) -> None:
    tpu_tree(tmp_path, "0x0063", 4, "dev/vfio/{}")
    readings, notes = read_tpu({"TPU_ACCELERATOR_TYPE": "v5litepod-4"}, tmp_path)
    assert [reading.id for reading in readings] == ["tpu:0", "tpu:1", "tpu:2", "tpu:3"]
    assert readings[0].name == "TPU v5e"
    assert readings[0].memory_label == "HBM"
    assert isinstance(readings[0].total_bytes, Missing)
    assert notes == []


def test_v2_and_v3_are_told_apart_by_the_environment(tmp_path: Path) -> None:
    tpu_tree(tmp_path, "0x0027", 1, "dev/accel{}")
    assert read_tpu({"TPU_ACCELERATOR_TYPE": "v2-8"}, tmp_path)[0][0].name == "TPU v2"
    assert read_tpu({}, tmp_path)[0][0].name == "TPU v3"


def test_vfio_devices_of_others_are_no_tpus_and_a_declared_one_may_be_absent(
    tmp_path: Path,
) -> None:
    write(tmp_path / "dev/vfio/0", "")
    assert read_tpu({}, tmp_path) == ([], [])
    readings, notes = read_tpu({"TPU_ACCELERATOR_TYPE": "v4-8"}, tmp_path)
    assert readings == []
    assert "there is no TPU device" in notes[0]


@pytest.mark.parametrize(
    ("setting", "order"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("1,9,0", [1]),
        ("-1", []),
        ("0,0", [0]),
        ("GPU-b", [1]),
        ("GPU-", []),
    ],
)
def test_visible_devices_are_chosen_as_cuda_does(setting: str | None, order: list[int]) -> None:
    found, note = visible_order(["GPU-aa", "GPU-bb", "GPU-cc"], setting, "CUDA_VISIBLE_DEVICES")
    assert found == order
    assert bool(note) == (len(order) < 3)


def test_one_reading_without_a_probe_has_the_host_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    devices = read_once(5.0)
    assert [device.id for device in devices.devices] == ["cpu"]
    words = "device probe: cannot be started: No such file or directory; other devices are unknown"
    assert words in devices.notes
    assert devices.unanswered == ()
