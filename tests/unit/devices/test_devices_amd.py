"""AMD cards are read from the amdgpu driver's files; what a file does not tell is missing, never 0."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from memconsole.devices.amd import read_amd
from memconsole.devices.reading import Missing

TREE = Path(__file__).parents[2] / "data" / "amdgpu"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copy = tmp_path / "root"
    shutil.copytree(TREE, copy)
    return copy


def test_cards_come_in_bus_order_with_their_numbers(tree: Path) -> None:
    (instinct, radeon), notes = read_amd({}, tree)
    assert notes == []
    assert (instinct.id, instinct.name) == ("cuda:0", "AMD Instinct MI300X")
    assert instinct.memory_label == "HBM"
    assert instinct.power_watts == 134.0
    assert (radeon.id, radeon.name) == ("cuda:1", "AMD Radeon RX 6750 XT")
    assert (radeon.kind, radeon.memory_label) == ("rocm", "VRAM")
    assert radeon.total_bytes == 12868124672
    assert radeon.used_bytes == 1373536256
    assert radeon.free_bytes == 12868124672 - 1373536256
    assert (radeon.utilization_percent, radeon.temperature_celsius) == (42.0, 51.0)
    assert radeon.power_watts == 97.0


def test_an_idle_card_is_0_percent_and_a_missing_sensor_is_missing(tree: Path) -> None:
    (instinct, _), _ = read_amd({}, tree)
    assert instinct.utilization_percent == 0.0
    assert instinct.temperature_celsius == Missing("the driver offers no temp1_input")


@pytest.mark.parametrize("content", [None, "", "n/a\n"])
def test_a_card_that_does_not_tell_its_memory(tree: Path, content: str | None) -> None:
    file = tree / "sys/class/drm/card0/device/mem_info_vram_used"
    file.unlink()
    if content is not None:
        file.write_text(content)
    (_, radeon), _ = read_amd({}, tree)
    assert isinstance(radeon.used_bytes, Missing)
    assert isinstance(radeon.free_bytes, Missing)
    assert radeon.total_bytes == 12868124672


def test_an_unknown_card_is_named_by_its_chip(tree: Path) -> None:
    (tree / "usr/share/libdrm/amdgpu.ids").unlink()
    (_, radeon), _ = read_amd({}, tree)
    assert radeon.name == "AMD GPU 73DF"


def test_hidden_cards_are_left_out_and_told(tree: Path) -> None:
    readings, notes = read_amd({"HIP_VISIBLE_DEVICES": "1"}, tree)
    assert [(r.id, r.name) for r in readings] == [("cuda:0", "AMD Radeon RX 6750 XT")]
    assert notes == ["AMD: 1 GPU hidden by HIP_VISIBLE_DEVICES"]
    readings, _ = read_amd({"ROCR_VISIBLE_DEVICES": "GPU-123456789abcdef0"}, tree)
    assert [r.name for r in readings] == ["AMD Instinct MI300X"]


def test_a_card_without_rocm_and_a_machine_without_a_card_say_so(
    tree: Path, tmp_path: Path
) -> None:
    (tree / "dev/kfd").unlink()
    assert read_amd({}, tree)[1] == ["AMD: no /dev/kfd, so ROCm cannot compute here"]
    assert read_amd({}, tmp_path / "nowhere") == ([], ["AMD: no amdgpu device"])


def test_a_hostile_product_name_is_cleaned(tree: Path) -> None:
    (tree / "sys/class/drm/card0/device/product_name").write_text("\x1b]0;x\x07Radeon\x1b[2J")
    (_, radeon), _ = read_amd({}, tree)
    assert "\x1b" not in radeon.name
