"""On a CPU a run may take what the machine has left: beyond it is an error that it can answer, not a kill."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.runs.act import launch as launching
from memconsole.runs.act.control import request
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.ladder import present_plan, rungs
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import create_run
from memconsole.runs.record.states import LIVE
from memconsole_trainer.host import memory_limit
from tests.faults.run_story import SUPERVISE

MIB = 2**20
BACKENDS = ("torch", "jax")
STACKS = memory_limit.STACK_BYTES * (os.cpu_count() or 1)
TRAINER = """
import sys
from memconsole import available_memory
from memconsole_trainer.__main__ import main
left = iter({left})
read = available_memory.fillable_bytes
available_memory.fillable_bytes = lambda: next(left) or read()
sys.exit(main())
"""
"""The real trainer, on a machine that has so much left before its build and behind it; None: as much as this one."""
Launch = Callable[..., RunDirectory]


def on_top_of(backend: str) -> tuple[int, int]:
    """Allowed beside what is left, from the build on and from the first step on."""
    return memory_limit.BUILD_MAPPED_BYTES[backend], memory_limit.STEPS_MAPPED_BYTES


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Starts a plan without a share of the machine; ends what it started."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "text").mkdir()
    for n in range(12):
        words = f"the cat {n} sat on a mat while dogs ran. " * 300
        (tmp_path / "text" / f"{n}.txt").write_text(words)
    started: list[RunDirectory] = []

    def launch_plan(
        backend: str,
        build_bytes: int | None = None,
        steps_bytes: int | None = None,
        **changes: Any,
    ) -> RunDirectory:
        """With so much that can be mapped from the build on, and from the first step on."""
        settings = {
            "backend": backend, "data.source": str(tmp_path / "text"), "data.vocab_size": 1024,
            "model.target_params": 1_000_000, "data.sequence_length": 64, "train.batch_size": 96,
            "train.max_steps": 4, "train.sample_tokens": 0, "train.log_every": 1, "device.name": "cpu",
            "train.warmup_steps": 2, "train.evaluation_batches": 2,
        } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
        plan = replace(Plan(), settings)
        assert plan.device.memory_fraction is None
        left = [
            None if wanted is None else wanted - on_top
            for wanted, on_top in zip((build_bytes, steps_bytes), on_top_of(backend), strict=True)
        ]
        script = tmp_path / f"trainer-{len(started)}.py"
        script.write_text(TRAINER.format(left=left))
        started.append(create_run(plan))
        command = [sys.executable, "-P", "-c", SUPERVISE, str(script)]
        launching.start_supervisor(started[-1], "--start", command)
        return started[-1]

    yield launch_plan
    for run in started:
        if liveness(run).live:
            request(run, "kill", "test")


def ended(run: RunDirectory, meanwhile: Callable[[], object] = lambda: None) -> RunSnapshot:
    follower, deadline = Follower(run), time.monotonic() + 240
    while (seen := follower.poll()).state in LIVE:
        assert time.monotonic() < deadline, (seen.state, seen.facts.phase, seen.log_tail)
        meanwhile()
        time.sleep(0.02)
    return seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_larger_than_what_is_left_ends_with_an_error(launch: Launch, backend: str) -> None:
    pytest.importorskip(backend)
    seen = ended(launch(backend, steps_bytes=100 * MIB))
    assert seen.verdict is not None
    assert seen.verdict.reason == "out_of_memory", (seen.verdict, seen.log_tail)
    assert seen.verdict.signal is None or seen.verdict.signal == "SIGABRT"


@pytest.mark.timeout(300)
def test_a_model_larger_than_what_is_left_ends_its_build_with_an_error(launch: Launch) -> None:
    pytest.importorskip("torch")
    changes = {"model__target_params": 40_000_000, "train__on_out_of_memory": "halve"}
    run = launch("torch", build_bytes=100 * MIB, **changes)
    seen = ended(run)
    assert seen.verdict is not None
    assert (seen.verdict.reason, seen.facts.phase) == ("out_of_memory", "build"), seen.verdict
    assert not rungs(run), "no micro-batch is small enough for it"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_smaller_micro_batches_bring_a_run_within_what_is_left(
    launch: Launch, backend: str
) -> None:
    pytest.importorskip(backend)
    run = launch(backend, steps_bytes=100 * MIB, train__on_out_of_memory="halve")
    seen = ended(run)
    assert seen.state == "finished", (seen.verdict, seen.log_tail)
    assert rungs(run)
    assert present_plan(run).train.batch_size < 96
    assert present_plan(run).effective_batch == 96


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_maps_no_more_on_top_of_what_it_fills_than_is_allowed(
    launch: Launch, backend: str
) -> None:
    pytest.importorskip(backend)
    # A fast heap also maps room ahead. Where that does not fit, the C library maps what was asked for.
    run = launch(backend, optimize__heap="tight")
    readings: dict[int, list[tuple[int, int]]] = {}

    def read() -> None:
        """What is mapped and what is filled, under each limit."""
        record = run.attempt_record(1)
        if record is None or record.trainer is None:
            return
        try:
            limit, _ = resource.prlimit(record.trainer.pid, resource.RLIMIT_DATA)
            text = Path(f"/proc/{record.trainer.pid}/status").read_text()
            kib = dict(line.split(":", 1) for line in text.splitlines())
            mapped, filled = (int(kib[k].split()[0]) * 1024 for k in ("VmData", "RssAnon"))
        except (OSError, KeyError):
            return
        if limit != resource.RLIM_INFINITY:
            readings.setdefault(limit, []).append((mapped, filled))

    seen = ended(run, read)
    assert seen.state == "finished", (seen.verdict, seen.log_tail)
    assert len(readings) == 2, "one limit on the build, one on the steps"
    for taken, on_top in zip(readings.values(), on_top_of(backend), strict=True):
        mapped, filled = (max(kind) - kind[0] for kind in zip(*taken, strict=True))
        assert mapped - filled < on_top + STACKS


def test_the_processes_on_a_cpu_share_what_a_plan_allows() -> None:
    two = {"device.count": 2, "optimize.sharding": "ddp", "device.memory_fraction": 0.5}
    for kind, shared in (("cpu", 2), ("gpu", 1)):
        facts = SimpleNamespace(device=SimpleNamespace(kind=kind, total_bytes=1000))
        assert memory_limit._share(replace(Plan(), two), facts) == 500 // shared  # type: ignore[arg-type]
        one = replace(Plan(), {"device.memory_fraction": 0.5})
        assert memory_limit._share(one, facts) == 500  # type: ignore[arg-type]
