"""Every process of a real run tells its memory and how long it waits, and the slowest one is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from memconsole.runs.read.follow import Follower
from memconsole.runs.read.report.report import report
from memconsole.runs.record import files
from memconsole.runs.record.log import events
from memconsole_trainer.engine import DeviceFacts
from tests.training.harness.runs import told
from tests.training.harness.torch_processes import plan_of, together
from tests.training.scale.test_distributed_runs import NODES, started, wait_for_end

PAUSE_SECONDS = 1.0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sharding", "more"), [("fsdp", {}), ("ddp", {}), ("fsdp", NODES)], ids=["fsdp", "ddp", "jax"]
)
def test_the_run_directory_has_the_memory_of_both_processes(
    environment: dict[str, str], text: Path, sharding: str, more: dict[str, object]
) -> None:
    run = started(environment, text, sharding, **more)
    assert wait_for_end(run) == "finished"
    last = told(run, events.Ranks)[-1]
    (begun,) = told(run, events.Started)
    assert begun.ranks == 2
    assert [one.rank for one in last.ranks] == [0, 1]
    memories = [one for one in told(run, events.Memory) if one.peak_bytes is not None]
    first, second = last.ranks
    assert first.peak_bytes == max(max(one.peak_bytes, one.allocated_bytes) for one in memories)
    for one in (first, second):
        assert one.peak_bytes is not None
        assert one.peak_host_bytes is not None
        assert 0 < one.peak_bytes < one.peak_host_bytes
        assert one.step == last.step
        assert {"train", "evaluate", "checkpoint"} <= set(one.peaks_by_phase)
        assert one.step_seconds is not None
        if more:
            assert one.exchange_seconds is None
        else:
            assert 0 < (one.exchange_seconds or 0) < one.step_seconds
    made = report(run)
    assert made.memory.measured.peak_bytes == max(first.peak_bytes, second.peak_bytes)
    assert [one.peak_bytes for one in made.memory.ranks] == [first.peak_bytes, second.peak_bytes]
    assert (made.slowest is None) == bool(more)
    stored = files.read_struct(run.receipt_path, _Receipt)
    assert stored is not None
    assert [one["peak_bytes"] for one in stored.ranks] == [first.peak_bytes, second.peak_bytes]
    assert len(Follower(run).poll().facts.ranks) == 2


class _Receipt(msgspec.Struct):
    ranks: list[dict[str, Any]]


@pytest.mark.parametrize("sharding", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_the_process_that_comes_last_waits_least(sharding: str) -> None:
    """Whatever the machine does meanwhile: one process pauses for seconds, and the other waits for it."""
    changes = {"optimize.sharding": sharding, "optimize.accumulation_steps": 2}
    first, second = together(plan_of(2, changes), pauses={1: PAUSE_SECONDS})
    assert first.exchange_seconds is not None
    assert second.exchange_seconds is not None
    assert first.exchange_seconds > 1.5 * PAUSE_SECONDS
    assert first.exchange_seconds > second.exchange_seconds + PAUSE_SECONDS


class _Card:
    """A device of JAX with scripted bytes."""

    def __init__(self, held: int, peak: int) -> None:
        self._held, self._peak = held, peak

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self._held, "peak_bytes_in_use": self._peak, "bytes_limit": 100}


def test_each_card_of_a_jax_process_is_read_and_the_fullest_one_is_the_processes_own() -> None:
    devices = pytest.importorskip("memconsole_jax.devices")
    facts = DeviceFacts("cuda:0", "a card", "gpu", "VRAM", 100)
    memory = devices.DeviceMemory((_Card(10, 20), _Card(9, 30), _Card(8, 15)), facts)
    assert [(one.allocated_bytes, one.peak_bytes) for one in memory.readings()] == [
        (10, 20), (9, 30), (8, 15)
    ]  # fmt: skip
    assert memory.reading() == memory.readings()[1]


def test_host_devices_of_a_jax_process_share_one_reading() -> None:
    devices = pytest.importorskip("memconsole_jax.devices")
    memory = devices.DeviceMemory(
        (_Card(1, 1),) * 4, DeviceFacts("cpu", "", "cpu", "host RAM", 100)
    )
    assert len(memory.readings()) == 1
