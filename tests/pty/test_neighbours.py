"""The comparison with other monitors: its stand-in driver, and how its ratios are told."""

from __future__ import annotations

import os
from pathlib import Path

import neighbours
import pytest
from fake_driver import build
from neighbours import OURS, Comparison, Figures

from memconsole.devices.probe import read_once


def test_the_stand_in_shows_as_many_busy_cards_as_asked(tmp_path: Path) -> None:
    if not build("busy", tmp_path):
        pytest.skip("no C compiler: the stand-in driver cannot be built")
    kept = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    shown = {"FAKE_NVML_CARDS": "3", "FAKE_NVML_PID": str(os.getpid())}
    devices = read_once(20.0, environment=kept | shown | {"LD_LIBRARY_PATH": str(tmp_path)})
    cards = [device for device in devices.devices if device.source == "NVML"]
    assert [card.id for card in cards] == ["cuda:0", "cuda:1", "cuda:2"]
    for card in cards:
        assert isinstance(card.utilization_percent, float)
        assert 84 <= card.utilization_percent <= 100
        assert isinstance(card.power_watts, float)
        assert 560 <= card.power_watts <= 695
        assert [process.pid for process in card.processes] == [os.getpid()]


def test_ratios_are_of_ours_and_say_that_the_cards_are_simulated() -> None:
    found = Comparison(8, True, {OURS: Figures(1, 200, 0.02, 60), "nvitop": Figures(0.5, 300, 0.03, 30)})  # fmt: skip
    head, ours, theirs = neighbours.told([found])
    assert head.startswith("8 simulated cards")
    assert "200 B/s" in ours
    assert " x" not in ours
    for words in ("0.50 s x0.5", "300 B/s x1.5", "3.0% of a core x1.5", "30 MiB x0.5"):
        assert words in theirs


def test_a_missing_nvitop_is_told() -> None:
    found = Comparison(1, False, {OURS: Figures(1, 200, 0.02, 60)})
    assert "nvitop is not compared" in neighbours.told([found])[-1]
