"""Readings of a GPU hold what the driver charges this process, not the use of the whole card."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from memconsole_trainer.engine import DeviceFacts, MemoryReading
from tests.unit.devices.fake_cards import Cards

OWN, OTHER, THIRD = os.getpid(), 1, 2
TOTAL, FREE = 80_000, 67_275


def told(reading: Callable[[], tuple[MemoryReading, ...]]) -> list[int | None]:
    """The device bytes, once the driver has answered."""
    deadline = time.monotonic() + 20
    while (found := reading())[0].device_bytes is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return [one.device_bytes for one in found]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [([(OWN, 786), (OTHER, 11_939)], 786), ([(OWN, None)], TOTAL - FREE), ([], TOTAL - FREE)],
)
def test_torch_reads_its_own_use_of_a_shared_card(
    listed: list[tuple[int, int | None]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch_memory(listed, monkeypatch)
    assert memory.reading().device_bytes is None  # the driver has not been asked
    memory.start()
    assert told(lambda: (memory.reading(),)) == [expected]
    assert memory.reading().device_total_bytes == TOTAL


def test_torch_does_not_take_the_whole_card_for_its_own_where_others_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = torch_memory([(OTHER, 786), (THIRD, 11_939)], monkeypatch)
    memory._driver.open()
    assert memory.reading().device_bytes is None


def test_torch_on_rocm_reads_the_use_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert torch_memory([(OWN, 786)], monkeypatch).reading().device_bytes == TOTAL - FREE


def torch_memory(
    listed: list[tuple[int, int | None]], patch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """The memory of a card that torch numbers 0 and the driver 1."""
    torch = pytest.importorskip("torch")
    devices = pytest.importorskip("memconsole_torch.devices")
    Cards({"GPU-first": [(OWN, 9), (OTHER, 5)], "GPU-second": listed}).install(patch)
    properties = SimpleNamespace(uuid="second")
    patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    patch.setattr(torch.cuda, "mem_get_info", lambda _: (FREE, TOTAL))
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        patch.setattr(torch.cuda, name, lambda _: 0)
    made: SimpleNamespace = devices.DeviceMemory(torch.device("cuda", 0))
    return made


class _Device:
    """A device of JAX whose pool holds `pool` bytes."""

    def __init__(self, pool: int) -> None:
        self._pool = pool

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": 1, "peak_bytes_in_use": self._pool, "pool_bytes": self._pool}


def test_each_device_of_jax_has_what_the_driver_charges_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second and the third card of four are this process's own; it has opened the first one, too."""
    cards = {
        "GPU-1": [(OWN, 3)],
        "GPU-2": [(OWN, 12), (OTHER, 99)],
        "GPU-3": [(OWN, 23)],
        "GPU-4": [],
    }
    Cards({name: list(listed) for name, listed in cards.items()}).install(monkeypatch)
    devices = pytest.importorskip("memconsole_jax.devices")
    facts = DeviceFacts("cuda:0", "a card", "gpu", "VRAM", 100)
    memory = devices.DeviceMemory((_Device(10), _Device(20)), facts)
    assert [one.device_bytes for one in memory.readings()] == [None, None]
    memory.start()
    assert told(memory.readings) == [12, 23]
    assert memory.reading().device_bytes == 23


@pytest.mark.parametrize(
    ("listed", "expected"), [([(OTHER, 7)], 7), ([(OTHER, 7), (THIRD, 8)], None)]
)
def test_jax_takes_the_only_process_of_the_only_card_for_its_own(
    listed: list[tuple[int, int | None]], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cards({"GPU-1": listed}).install(monkeypatch)
    devices = pytest.importorskip("memconsole_jax.devices")
    facts = DeviceFacts("cuda:0", "a card", "gpu", "VRAM", 100)
    memory = devices.DeviceMemory((_Device(10),), facts)
    memory._driver.open()
    assert memory.reading().device_bytes == expected
