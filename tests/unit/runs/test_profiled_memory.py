"""What a profiler takes and leaves behind is not counted as the plan's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from memconsole.runs.read.state.reduce import PROFILING, RunState, reduce
from memconsole.runs.record.log import events
from memconsole_trainer.engine import MemoryReading
from memconsole_trainer.host import host_memory
from memconsole_trainer.host.host_memory import HostMemory, Resident, Tree
from memconsole_trainer.loop import watch as watching
from memconsole_trainer.loop.watch import Watch
from memconsole_trainer.process_group import SingleProcess

IDLE = 300
"""Bytes of the process besides what the engine holds."""


class _Machine:
    """A process with scripted bytes: now, and the most since the last reset."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.now = self.most = 0

    def hold(self, count: int, peak: int) -> None:
        self.now, self.most = count, max(self.most, peak)
        HostMemory.highest_anonymous = max(HostMemory.highest_anonymous, IDLE + peak)

    process_group = SingleProcess()

    @property
    def device(self) -> Any:
        return self

    def memory(self) -> MemoryReading:
        return MemoryReading(self.now, self.most, self.now, self.now, 10_000)

    def memories(self) -> tuple[MemoryReading, ...]:
        return (self.memory(),)

    def reset_peak(self) -> None:
        HostMemory.highest_resident = max(HostMemory.highest_resident, IDLE + self.most)
        self.most = self.now

    def synchronize(self) -> None: ...


class _Attempt:
    def __init__(self) -> None:
        self.told: list[events.Record] = []

    def emit(self, event: events.Record) -> None:
        self.told.append(event)

    def progress(self, phase: str, step: int) -> None: ...


class _Progress:
    step = 5


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_peak_after_a_profile_is_that_of_the_plan(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, attempt = _Machine(kind), _Attempt()
    monkeypatch.setattr(HostMemory, "highest_anonymous", 0)
    monkeypatch.setattr(HostMemory, "highest_resident", 0)
    monkeypatch.setattr(
        host_memory, "resident", lambda: Resident(0, 0, IDLE + machine.most if kind == "cpu" else 0)
    )
    monkeypatch.setattr(
        watching,
        "tree_memory",
        lambda: Tree(resident=IDLE + machine.now, anonymous=IDLE + machine.now, shared=0),
    )
    watch = Watch(cast(Any, attempt), cast(Any, machine), cast(Any, _Progress()))
    watch.enter("train")
    machine.hold(40, 100)
    with watch.outside_training(PROFILING):
        machine.hold(500, 900)
        machine.hold(70 if kind == "cpu" else 40, 0)  # 30 bytes stay with the profiler
    machine.hold(70 if kind == "cpu" else 40, 135 if kind == "cpu" else 105)
    watch.report_memory()
    state = RunState()
    for record in attempt.told:
        state = reduce(state, record)
    assert state.peaks_by_phase == {"train": 105, PROFILING: 900}
    assert state.peak_bytes == 105
    if kind == "cpu":
        assert state.peak_host_bytes == IDLE + 105
        assert state.peak_host_anonymous_bytes == IDLE + 105
        assert state.memory is not None
        assert state.memory.allocated_bytes == 40


def test_what_a_compiler_took_before_the_baseline_counts_as_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline is taken after compiling, and with it the kernel's mark begins anew."""
    watched = HostMemory._watched() if HostMemory._watched is not None else None
    if watched is not None:
        watched.close()  # the thread of an engine of another test would read the marks below
    marks = iter([900, 300, 300, 300, 300])
    monkeypatch.setattr(host_memory, "_CLEAR_REFS", str(tmp_path / "clear_refs"))
    monkeypatch.setattr(host_memory, "resident", lambda: Resident(200, 50, next(marks, 300)))
    monkeypatch.setattr(HostMemory, "highest_resident", 0)
    memory = HostMemory(period_seconds=60.0)
    memory.reset_peak()
    assert HostMemory.highest_resident == 900
    assert memory.peak_bytes() == 200
    memory.reset_peak()
    assert HostMemory.highest_resident == 900
    machine, attempt = _Machine("cpu"), _Attempt()
    monkeypatch.setattr(host_memory, "resident", lambda: Resident(200, 50, 300))
    monkeypatch.setattr(
        watching, "tree_memory", lambda: Tree(resident=250, anonymous=200, shared=0)
    )
    Watch(cast(Any, attempt), cast(Any, machine), cast(Any, _Progress())).report_memory()
    (told,) = attempt.told
    assert isinstance(told, events.Memory)
    assert told.peak_host_bytes == 900
