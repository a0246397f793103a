"""What the system tells of the processor. The trainers and the console ask the same functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from memconsole.plan.machine import processor

X86 = """processor : 0
vendor_id\t: AuthenticAMD
model name\t: AMD Ryzen 9 7950X
cpu MHz\t\t: 4500.5
flags\t\t: fpu avx2 avx512f

processor : 1
model name\t: another
cpu MHz\t\t: 400
flags\t\t: fpu
"""
ARM = "processor : 0\nFeatures\t: fp asimd\n\nHardware\t: BCM2711\n"


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    return tmp_path / "cpuinfo"


def test_the_first_cpu_is_told(cpuinfo: Path) -> None:
    cpuinfo.write_text(X86)
    assert processor.name(cpuinfo) == "AMD Ryzen 9 7950X"
    assert processor.megahertz(cpuinfo) == 4500.5
    assert processor.flags(cpuinfo) == {"fpu", "avx2", "avx512f"}


def test_arm_processors_have_a_name_and_flags_too(cpuinfo: Path) -> None:
    cpuinfo.write_text(ARM)
    assert processor.name(cpuinfo) == "BCM2711"
    assert processor.flags(cpuinfo) == {"fp", "asimd"}


@pytest.mark.parametrize("text", [None, "", "cpu MHz : unknown\nmodel name :\n"])
def test_what_is_not_told_is_unknown(text: str | None, cpuinfo: Path) -> None:
    if text is not None:
        cpuinfo.write_text(text)
    assert processor.name(cpuinfo)
    assert processor.megahertz(cpuinfo) is None
    assert processor.flags(cpuinfo) == frozenset()
