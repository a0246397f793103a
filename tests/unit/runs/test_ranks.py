"""What the ranks of a run tell: folded from the log, written and read by its processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.report.receipt import write_receipt
from memconsole.runs.read.state.ranks import SILENT, RankFacts, own_seconds, slowest
from memconsole.runs.read.state.reduce import RunState, begin_attempt, forget_memory, reduce
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events, readings
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.log.events import RankReading, Ranks
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.engine import MemoryReading
from memconsole_trainer.loop import ranks as loop_ranks
from memconsole_trainer.loop.ranks import RankReadings, rank_count

MIB = 2**20


def started(ranks: int, attempt: int = 1, **changes: Any) -> events.Started:
    values: dict[str, Any] = {
        "attempt": attempt, "backend": "torch", "versions": {}, "device_id": "cuda:0",
        "device_name": "GPU 0", "device_kind": "gpu", "memory_label": "VRAM", "platform_lines": (),
    }  # fmt: skip
    return events.Started(ranks=ranks, **(values | changes))


def reading(rank: int, peak: int = 100, step: int = 10, **changes: Any) -> RankReading:
    values: dict[str, Any] = {
        "allocated_bytes": peak * MIB // 2,
        "peak_bytes": peak * MIB,
        "peak_device_bytes": (peak + 10) * MIB,
        "peak_host_bytes": (peak + 20) * MIB,
        "peaks_by_phase": {"train": peak * MIB},
        "step_seconds": 1.0,
        "exchange_seconds": 0.2,
    }
    return RankReading(rank=rank, step=step, **(values | changes))


def folded(*records: events.Record) -> RunState:
    state = RunState()
    for record in records:
        state = reduce(state, record)
    return state


def told(*ranks: RankReading) -> Ranks:
    return Ranks(step=max(one.step for one in ranks), ranks=ranks)


@pytest.mark.parametrize("count", [2, 8, 64])
def test_the_peaks_of_a_run_are_those_of_its_fullest_rank(count: int) -> None:
    fullest = count // 2
    ranks = [reading(n, 100 + (50 if n == fullest else 0)) for n in range(count)]
    state = folded(started(count), told(*ranks))
    assert [one.reading for one in state.ranks] == ranks
    assert state.peak_bytes == 150 * MIB
    assert state.peak_device_bytes == 160 * MIB
    assert state.peak_host_bytes == 170 * MIB
    assert state.peaks_by_phase == {"train": 150 * MIB}


def test_a_run_of_one_process_has_no_ranks() -> None:
    state = folded(started(1))
    assert (state.rank_count, state.ranks) == (1, ())


def test_a_rank_that_has_told_nothing_is_counted_all_the_same() -> None:
    state = folded(started(3), told(reading(0), reading(2)))
    assert state.rank_count == 3
    assert [one.reading.rank for one in state.ranks] == [0, 2]


def test_a_rank_that_died_keeps_what_it_told_last_and_is_silent() -> None:
    last = reading(1, 300, step=20)
    state = folded(started(2), told(reading(0), last))
    for step in range(30, 30 + 10 * SILENT, 10):
        assert not any(one.silent for one in state.ranks)
        reduce(state, told(reading(0, step=step), last))
    assert [one.silent for one in state.ranks] == [False, True]
    assert state.ranks[1].reading == last
    reduce(state, told(reading(0, step=90), reading(1, step=90)))
    assert not any(one.silent for one in state.ranks)


def test_a_rank_keeps_the_peaks_of_earlier_attempts() -> None:
    state = folded(started(2), told(reading(0), reading(1, 300)))
    state = begin_attempt(state, 2)
    reduce(state, started(2, 2))
    reduce(state, told(reading(0), reading(1, 200)))
    assert state.ranks[1].reading.peak_bytes == 300 * MIB
    assert state.ranks[1].reading.peaks_by_phase == {"train": 300 * MIB}
    assert state.ranks[1].reading.allocated_bytes == 100 * MIB


@pytest.mark.parametrize("count", [1, 4])
def test_ranks_of_another_number_of_devices_are_forgotten(count: int) -> None:
    state = begin_attempt(folded(started(2), told(reading(0), reading(1))), 2)
    reduce(state, started(count, 2))
    assert (state.rank_count, state.ranks) == (count, ())


def test_smaller_micro_batches_have_peaks_of_their_own() -> None:
    state = forget_memory(folded(started(2), told(reading(0, 900), reading(1, 900))))
    reduce(state, told(reading(0), reading(1)))
    assert state.ranks[1].reading.peak_bytes == state.peak_bytes == 100 * MIB


@pytest.mark.parametrize(
    "odd",
    [
        reading(2),
        reading(-1),
        reading(1, allocated_bytes=-5),
        reading(1, peaks_by_phase={"train": 1 << 70}),
    ],
)
def test_impossible_readings_are_left_out_and_counted(odd: RankReading) -> None:
    state = folded(started(2), told(reading(0), odd))
    assert (state.ranks, state.odd, state.peak_bytes) == ((), 1, None)


def test_texts_and_times_of_a_reading_are_made_harmless() -> None:
    evil = reading(1, peaks_by_phase={"\x1b[2Jtrain": MIB}, exchange_seconds=math.nan)
    state = folded(started(2), told(evil))
    (one,) = state.ranks
    assert "\x1b" not in "".join(one.reading.peaks_by_phase)
    assert one.reading.exchange_seconds is None


def facts(*exchanged: float | None, step: float = 1.0) -> tuple[RankFacts, ...]:
    return tuple(
        RankFacts(reading=reading(n, step_seconds=step, exchange_seconds=seconds))
        for n, seconds in enumerate(exchanged)
    )


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    found = slowest(facts(0.4, 0.3, 0.1, 0.35, step=2.0))
    assert found is not None
    assert (found.rank, found.share) == (2, pytest.approx((0.35 - 0.1) / 2))
    assert found.clearly
    assert found.words == "12 %"


def test_ranks_that_are_equally_fast_have_no_slow_one() -> None:
    found = slowest(facts(*[0.2] * 64))
    assert found is not None
    assert (found.rank, found.share, found.clearly) == (0, 0.0, False)


@pytest.mark.parametrize("ranks", [(), facts(0.2), facts(None, 0.1), facts(None, None)])
def test_no_rank_is_slowest_if_there_is_nothing_to_compare(ranks: tuple[RankFacts, ...]) -> None:
    assert slowest(ranks) is None


def test_a_rank_computes_for_the_step_less_what_it_waits_for_the_slowest() -> None:
    assert own_seconds(facts(0.4, None, 0.1)) == {0: pytest.approx(0.7), 2: pytest.approx(1.0)}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    plan = replace(Plan(), {"device.count": 2, "optimize.sharding": "fsdp"})
    made = create_run(plan, None, {})
    made.new_attempt()
    return made


def test_the_receipt_compares_with_the_fullest_rank_and_keeps_each(run: RunDirectory) -> None:
    writer = EventWriter(run.attempt_path(1))
    memory = events.Memory(
        phase="train", step=10, allocated_bytes=MIB, peak_bytes=100 * MIB, reserved_bytes=None,
        device_bytes=MIB, device_total_bytes=None, host_bytes=MIB,
    )  # fmt: skip
    for record in (started(2), memory, told(reading(0), reading(1, 300, exchange_seconds=0.0))):
        writer.write(record)
    writer.close()
    receipt = write_receipt(run)
    assert receipt.measured.peak_bytes == 300 * MIB
    assert receipt.by_phase == {"train": 300 * MIB}
    assert [one.peak_bytes for one in receipt.ranks] == [100 * MIB, 300 * MIB]
    row = next(row for row in receipt.comparison if row.name == "allocated")
    assert row.measured_bytes == 300 * MIB
    stored = msgspec.json.decode(run.receipt_path.read_bytes())
    assert stored["ranks"][1]["exchange_seconds"] == 0.0


def test_the_state_that_is_saved_holds_the_ranks(run: RunDirectory) -> None:
    writer = EventWriter(run.attempt_path(1))
    for record in (started(2), told(reading(0), reading(1, 300))):
        writer.write(record)
    writer.close()
    first = Follower(run)
    assert first.save_state()
    assert Follower(run).state.ranks == first.state.ranks != ()


class _ProcessGroup:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.met = rank, size, 0

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        self.met += 1
        return numbers


class _Engine:
    """A process with scripted bytes."""

    def __init__(self, rank: int, size: int, devices: int = 1) -> None:
        self.process_group = _ProcessGroup(rank, size)
        self.held = [MIB] * devices

    def memories(self) -> tuple[MemoryReading, ...]:
        return tuple(MemoryReading(n, 2 * n, n, n, None) for n in self.held)


class _Attempt:
    def __init__(self, path: Path) -> None:
        self.path, self.told = path, list[Ranks]()

    def emit(self, event: Ranks) -> None:
        self.told.append(event)


NOW = [0.0]
"""The clock: a step takes two seconds."""
Made = tuple[list[_Engine], list[RankReadings], _Attempt]


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    """The processes of an attempt, in this one; the first process's attempt."""
    monkeypatch.setattr(loop_ranks.time, "monotonic", lambda: NOW[0])
    (tmp_path / readings.FOLDER).mkdir()

    def make(size: int, devices: int = 1) -> Made:
        engines = [_Engine(rank, size, devices) for rank in range(size)]
        attempts = [_Attempt(tmp_path) for _ in range(size)]
        made = [
            RankReadings(cast(Any, attempt), cast(Any, engine))
            for attempt, engine in zip(attempts, engines, strict=True)
        ]
        return engines, made, attempts[0]

    return make


def take(made: list[RankReadings], step: int, phase: str = "train") -> None:
    NOW[0] = 2.0 * step
    for one in reversed(made):  # the first process reads what the others have told
        found = one._engine.memories()
        one.take(found, phase, step, 5 * MIB, 6 * MIB)


def test_the_first_process_logs_what_the_others_have_written(
    processes: Callable[..., Made],
) -> None:
    engines, made, attempt = processes(2)
    engines[1].held = [7 * MIB]
    made[1].count(4, 8.0, 2.0)
    take(made, 3, "evaluate")
    engines[1].held = [3 * MIB]
    take(made, 4)
    first, second = attempt.told[-1].ranks
    assert (first.rank, second.rank, second.step) == (0, 1, 4)
    assert second.allocated_bytes == 3 * MIB
    assert second.peak_bytes == 14 * MIB
    assert second.peaks_by_phase == {"evaluate": 14 * MIB, "train": 6 * MIB}
    assert (second.step_seconds, second.exchange_seconds) == (2.0, 0.5)
    assert first.exchange_seconds is None
    assert (second.host_bytes, second.peak_host_bytes) == (5 * MIB, 6 * MIB)


def test_a_process_without_a_readable_file_is_left_out(
    processes: Callable[..., Made], tmp_path: Path
) -> None:
    _, made, attempt = processes(3)
    take([made[0], made[2]], 1)
    assert [one.rank for one in attempt.told[-1].ranks] == [0, 2]
    (tmp_path / readings.FOLDER / "reading-2.json").write_bytes(b"{")
    take([made[0]], 2)
    assert [one.rank for one in attempt.told[-1].ranks] == [0]


def test_many_ranks_are_logged_less_often(processes: Callable[..., Made]) -> None:
    few, many = processes(8), processes(64)
    for step in range(64):
        take(few[1][:1], step)
        take(many[1][:1], step)
    assert (len(few[2].told), len(many[2].told)) == (64, 16)


def test_the_last_readings_are_logged_after_all_have_written(
    processes: Callable[..., Made],
) -> None:
    engines, made, attempt = processes(2)
    take(made, 1)
    before = len(attempt.told)
    take([made[1]], 2, "checkpoint")
    for one in made:
        one.last(2)
    assert [engine.process_group.met for engine in engines] == [1, 1]
    assert len(attempt.told) == before + 1
    assert "checkpoint" in attempt.told[-1].ranks[1].peaks_by_phase


def test_devices_of_one_process_are_told_apart(processes: Callable[..., Made]) -> None:
    (engine,), (made,), attempt = processes(1, devices=4)
    engine.held = [MIB, 2 * MIB, 3 * MIB, 4 * MIB]
    assert rank_count(cast(Any, engine)) == 4
    take([made], 1)
    ranks = attempt.told[-1].ranks
    assert [(one.rank, one.allocated_bytes) for one in ranks] == [
        (n, (n + 1) * MIB) for n in range(4)
    ]


def test_one_device_tells_nothing_besides_its_memory(processes: Callable[..., Made]) -> None:
    _, (made,), attempt = processes(1)
    take([made], 1)
    made.last(1)
    assert attempt.told == []


def test_what_a_profiler_takes_is_not_the_plans(processes: Callable[..., Made]) -> None:
    engines, made, attempt = processes(2)
    take(made, 1)
    engines[0].held = [900 * MIB]
    take(made, 2, "profile")
    engines[0].held = [MIB]
    take(made, 3)
    assert attempt.told[-1].ranks[0].peaks_by_phase == {"train": 2 * MIB}


def test_a_full_disk_loses_the_reading_and_nothing_else(
    processes: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_atomic", full)
    _, made, attempt = processes(2)
    take(made, 1)
    assert [one.rank for one in attempt.told[-1].ranks] == [0]
