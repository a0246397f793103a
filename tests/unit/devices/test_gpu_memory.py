"""A run's device bytes are those that NVIDIA's driver charges its own process."""

from __future__ import annotations

import os
from typing import Any

import pynvml
import pytest

from memconsole_trainer.host.gpu_memory import GpuMemory
from tests.unit.devices.fake_cards import Cards

OWN, OTHER, THIRD = os.getpid(), 1, 2


def opened(cards: Cards, patch: pytest.MonkeyPatch, uuid: str = "") -> GpuMemory:
    cards.install(patch)
    memory = GpuMemory(uuid)
    memory.open()
    return memory


@pytest.mark.parametrize(
    ("listed", "charged", "alone"),
    [
        ([(OWN, 786), (OTHER, 12_000)], [786], False),
        ([(OWN, 786)], [786], True),
        ([(OTHER, 786)], [786], True),  # a container's own process numbers
        ([(OTHER, 786), (THIRD, 12_000)], [], False),
        ([(OWN, None)], [], True),
        ([(OWN, 0), (OTHER, 12_000)], [], False),
        ([], [], True),
    ],
)
def test_only_this_process_is_counted(
    listed: list[tuple[int, int | None]],
    charged: list[int],
    alone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = opened(Cards({"GPU-a": listed}), monkeypatch)
    assert memory.charged() == charged
    assert memory.alone == alone


def test_a_card_is_found_by_its_uuid_and_a_part_of_a_card_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = Cards({"GPU-a": [(OWN, 5)], "GPU-b": [(OWN, 7)], "MIG-c": [(OWN, 9)]})
    assert opened(cards, monkeypatch, "a").charged() == [5]
    assert opened(cards, monkeypatch, "c").charged() == [9]
    assert opened(cards, monkeypatch, "unknown").charged() == [9, 7, 5]


def test_cards_without_this_process_or_of_others_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = Cards({"GPU-a": [(OTHER, 9)], "GPU-b": [(OWN, 7)], "GPU-c": [], "GPU-d": [(OWN, 8)]})
    cards.refused = "GPU-c"
    assert opened(cards, monkeypatch).charged() == [8, 7]
    cards.listed = {"GPU-a": [(OTHER, 9)], "GPU-b": []}
    assert opened(cards, monkeypatch).charged() == []


def test_a_driver_that_fails_tells_nothing_and_other_processes_are_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = Cards({"GPU-a": [(OWN, 7), (OTHER, 9)]})
    memory = opened(cards, monkeypatch, "a")
    assert memory.charged() == [7]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", _fails)
    assert memory.charged() == []
    assert not memory.alone


def test_without_a_driver_no_other_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", _fails)
    memory = GpuMemory("a")
    memory.open()
    assert memory.charged() == []
    assert memory.alone


def test_before_the_driver_answers_nothing_is_known() -> None:
    memory = GpuMemory("a")
    assert memory.charged() == []
    assert not memory.alone


def _fails(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
