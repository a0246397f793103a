"""A slice of an NVIDIA card (MIG) is the only GPU that a program sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from memconsole.devices.nvidia import Nvidia
from memconsole.devices.reading import Missing

GIB = 1 << 30
CARD, SLICE = "GPU-a", "MIG-b"
SIZES = {CARD: 80 * GIB, SLICE: 10 * GIB}
NAMES = {CARD: "NVIDIA H100 80GB HBM3", SLICE: "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def by_uuid(uuid: str) -> str:
        if uuid not in SIZES:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def memory(handle: str, **_: object) -> Any:
        return SimpleNamespace(total=SIZES[handle], used=GIB, free=SIZES[handle] - GIB)

    answers = {
        "Init": lambda: None, "DeviceGetCount": lambda: 1,
        "DeviceGetHandleByIndex": lambda _: CARD, "DeviceGetHandleByUUID": by_uuid,
        "DeviceGetUUID": str, "DeviceGetName": NAMES.__getitem__, "DeviceGetMemoryInfo": memory,
        "DeviceGetMigMode": lambda _: (pynvml.NVML_DEVICE_MIG_ENABLE, 1),
        "DeviceGetUtilizationRates": refused, "DeviceGetTemperature": refused,
        "DeviceGetPowerUsage": refused, "DeviceGetComputeRunningProcesses_v3": lambda _: [],
        "DeviceGetGraphicsRunningProcesses_v3": lambda _: [],
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)


@pytest.mark.parametrize("setting", [SLICE, f" {SLICE},MIG-c"])
def test_the_first_slice_that_is_named_is_the_device(setting: str) -> None:
    (found,), notes = Nvidia({"CUDA_VISIBLE_DEVICES": setting}).read()
    assert (found.id, found.name, found.total_bytes) == ("cuda:0", NAMES[SLICE], SIZES[SLICE])
    assert found.memory_label == "HBM"
    assert isinstance(found.utilization_percent, Missing)
    assert notes == []


def test_a_slice_that_is_not_there_has_no_memory() -> None:
    (found,), _ = Nvidia({"CUDA_VISIBLE_DEVICES": "MIG-z"}).read()
    assert found.name == "MIG-z"
    assert isinstance(found.total_bytes, Missing)


def test_a_divided_card_is_said() -> None:
    (found,), (note,) = Nvidia({}).read()
    assert found.total_bytes == SIZES[CARD]
    assert "GPU 0 is divided into slices (MIG), of which CUDA sees one" in note
