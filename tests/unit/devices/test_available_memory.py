"""What is left to a process is what the tightest control group leaves of the machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from memconsole.available_memory import fillable_bytes, memory_limit
from tests.unit.devices.cgroups import GIB, version_2, write

RAM = 64 << 30


def test_version_2_limits_count_droppable_file_pages_as_free(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/user.slice/job\n")
    version_2(tmp_path, "user.slice/job", str(8 * GIB), 6 * GIB, 2 * GIB)
    limit = memory_limit(tmp_path, RAM)
    assert limit is not None
    assert (limit.limit_bytes, limit.free_bytes, limit.version) == (8 * GIB, 4 * GIB, 2)


def test_a_group_above_may_be_tighter(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/user.slice/job\n")
    version_2(tmp_path, "user.slice/job", str(8 * GIB), 1 * GIB, 0)
    version_2(tmp_path, "user.slice", str(4 * GIB), 3 * GIB, 0)
    limit = memory_limit(tmp_path, RAM)
    assert limit is not None
    assert (limit.limit_bytes, limit.free_bytes) == (4 * GIB, 1 * GIB)


@pytest.mark.parametrize("text", ["max", str(RAM), str(RAM * 2), "rubbish"])
def test_no_limit_below_the_machines_memory_is_no_limit(tmp_path: Path, text: str) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    version_2(tmp_path, "job", text, 1, 0)
    assert memory_limit(tmp_path, RAM) is None


def test_in_a_container_the_path_outside_is_not_there_but_the_limit_is(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/docker/0123456789ab\n")
    version_2(tmp_path, "", str(2 * GIB), GIB, 0)
    limit = memory_limit(tmp_path, RAM)
    assert limit is not None
    assert limit.limit_bytes == 2 * GIB


def test_version_1_limits(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu:/x\n4:memory:/slurm/job_1\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory/slurm/job_1"
    write(folder / "memory.limit_in_bytes", str(16 * GIB))
    write(folder / "memory.usage_in_bytes", str(10 * GIB))
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {3 * GIB}\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    limit = memory_limit(tmp_path, RAM)
    assert limit is not None
    assert (limit.limit_bytes, limit.free_bytes, limit.version) == (16 * GIB, 9 * GIB, 1)


def test_use_beyond_a_lowered_limit_leaves_nothing_free(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    version_2(tmp_path, "job", str(GIB), 3 * GIB, 0)
    limit = memory_limit(tmp_path, RAM)
    assert limit is not None
    assert limit.free_bytes == 0


def test_a_group_path_cannot_lead_out_of_the_tree(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/../../../../etc\n")
    write(tmp_path / "etc/memory.max", "5")
    assert memory_limit(tmp_path, RAM) is None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GiB, of which 20 are left, and 4 of swap."""
    ram = SimpleNamespace(total=RAM, available=20 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: ram)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=4 * GIB))


@pytest.mark.usefixtures("machine")
def test_without_a_group_the_machine_and_its_swap_can_be_filled(tmp_path: Path) -> None:
    assert fillable_bytes(tmp_path) == 24 * GIB


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("swap", "used", "allowed"), [("max", 0, 4), ("0", 0, 0), (str(3 * GIB), GIB, 2)]
)
def test_a_group_can_be_filled_without_its_file_pages_and_as_far_as_it_may_swap(
    tmp_path: Path, swap: str, used: int, allowed: int
) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    version_2(tmp_path, "job", str(8 * GIB), 6 * GIB, GIB)
    folder = tmp_path / "sys/fs/cgroup/job"
    write(folder / "memory.stat", f"inactive_file {GIB}\nactive_file {2 * GIB}\n")
    write(folder / "memory.swap.max", swap)
    write(folder / "memory.swap.current", str(used))
    assert fillable_bytes(tmp_path) == (5 + allowed) * GIB
    version_2(tmp_path, "job", str(40 * GIB), GIB, 0)
    assert fillable_bytes(tmp_path) == 24 * GIB, "the machine has less"


@pytest.mark.usefixtures("machine")
def test_version_1_limits_ram_and_swap_together(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/job\n")
    folder = tmp_path / "sys/fs/cgroup/memory/job"
    write(folder / "memory.limit_in_bytes", str(8 * GIB))
    write(folder / "memory.usage_in_bytes", str(6 * GIB))
    write(folder / "memory.stat", f"total_inactive_file {GIB}\ntotal_active_file {GIB}\n")
    assert fillable_bytes(tmp_path) == (4 + 4) * GIB
    write(folder / "memory.memsw.limit_in_bytes", str(9 * GIB))
    write(folder / "memory.memsw.usage_in_bytes", str(6 * GIB))
    assert fillable_bytes(tmp_path) == (4 + 1) * GIB


def test_this_machine_has_something_left() -> None:
    memory = psutil.virtual_memory()
    assert 0 < fillable_bytes() <= memory.total + psutil.swap_memory().total
