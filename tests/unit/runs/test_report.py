"""A report has exactly the shape the design promises, and the numbers the events told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from memconsole.cli.runs.memory_report import memory_lines
from memconsole.memory.estimate import estimate
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, apply_settings
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.report.comparison import EstimatedTable, MemoryLine, compare
from memconsole.runs.read.report.receipt import Receipt, driver_version, write_receipt
from memconsole.runs.read.report.report import report
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures.shortfall import (
    Shortfall,
    held_bytes,
    requested_bytes,
    shortfall,
)
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.records import ExitRecord
from memconsole.runs.record.run_store import create_run
from memconsole.runs.record.states import Verdict
from tests.unit.runs.written import started

BUDGET = Budget(
    name="a processor",
    kind="cpu",
    memory_label="host RAM",
    total_bytes=8 << 30,
    usable_bytes=6 << 30,
    why="free now",
    local=True,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Two attempts: the first is interrupted after step 40, the second resumes at 20 and finishes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    plan = apply_settings(Plan(), ["backend=jax", "train.batch_size=4"])
    made = create_run(plan, "two attempts")
    estimated = msgspec.json.encode(estimate(plan, BUDGET))
    files.write_atomic(made.path / "estimate.json", estimated)
    first = _attempt(made, resumed_step=0)
    for step in (10, 20, 30, 40):
        first.write(_step(step, 5.0 - step / 100))
    first.write(_memory("train", 700, 800, 9000))
    first.write(_evaluation(20, 4.0))
    first.write(_evaluation(40, 1.0))
    second = _attempt(made, resumed_step=20)
    for step in (30, 40, 50):
        second.write(_step(step, 4.5 - step / 100))
    second.write(_memory("evaluate", 500, 600, 9500))
    second.write(_evaluation(50, 3.5))
    second.write(events.Epoch(epoch=1, train_loss=4.2, validation_loss=3.5, minutes=2.0))
    second.write(
        events.Ended(
            step=50,
            best_validation_loss=3.5,
            final_validation_loss=3.5,
            final_train_loss=4.2,
            total_minutes=2.5,
            average_epoch_minutes=2.0,
            epochs=1,
        )
    )
    for number in (1, 2):
        verdict = Verdict(reason="finished", evidence="exit code 0", exit_code=0)
        record = ExitRecord(verdict=verdict, time_wall=1.0)
        files.write_struct(made.attempt_path(number) / "exit.json", record)
    return made


def _attempt(run: RunDirectory, resumed_step: int, device_kind: str = "cpu") -> EventWriter:
    number = run.new_attempt()
    writer = EventWriter(run.attempt_path(number))
    of_jax = {"backend": "jax", "versions": {"jax": "0.10.2"}}
    writer.write(started(number, resumed_step, device_kind=device_kind, **of_jax))
    return writer


def _step(step: int, loss: float) -> events.Step:
    return events.Step(
        step=step,
        epoch=1,
        loss=loss,
        learning_rate=1e-3,
        gradient_norm=1.0,
        tokens=step * 8,
        tokens_per_second=100.0 + step,
        step_seconds=0.1,
    )


def _evaluation(step: int, loss: float) -> events.Evaluation:
    return events.Evaluation(
        step=step,
        loss=loss,
        bits_per_byte=loss / 2,
        tokens=100,
        seconds=1.0,
        metrics={"unigram_loss": 6.5},
    )


def test_the_screen_and_the_report_tell_the_same_best_and_final_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = create_run(Plan())
    log = _attempt(made, resumed_step=0)
    log.write(_step(10, 2.0))
    log.write(_evaluation(10, 3.5))
    log.write(events.Epoch(epoch=1, train_loss=2.0, validation_loss=3.0, minutes=2.0))
    nothing_learned = events.Ended(
        step=20, best_validation_loss=None, final_validation_loss=None, final_train_loss=None,
        total_minutes=2.5, average_epoch_minutes=None, epochs=1,
    )  # fmt: skip
    log.write(nothing_learned)
    told, shown = report(made), Follower(made).poll()
    assert told.final_train_loss is shown.final_train_loss is None
    assert told.best_validation_loss == shown.best_validation_loss == 3.5
    assert told.average_epoch_minutes == shown.average_epoch_minutes == 2.0


def _memory(phase: str, allocated: int, peak: int, host: int) -> events.Memory:
    return events.Memory(
        phase=phase,
        step=1,
        allocated_bytes=allocated,
        peak_bytes=peak,
        reserved_bytes=None,
        device_bytes=peak,
        device_total_bytes=8 << 30,
        host_bytes=host,
        peak_host_anonymous_bytes=host // 3,
        peak_host_shared_bytes=host // 9,
    )


def test_the_document_has_the_keys_the_design_promises(run: RunDirectory) -> None:
    document = json.loads(msgspec.json.encode(report(run)))
    assert list(document) == [
        "run",
        "name",
        "backend",
        "device",
        "verdict",
        "plan",
        "steps",
        "evaluations",
        "epochs",
        "memory",
        "best_validation_loss",
        "final_train_loss",
        "unigram_loss",
        "total_minutes",
        "average_epoch_minutes",
        "attempts",
        "average_units_per_second",
        "best",
        "tags",
        "note",
        "ladder",
        "task",
        "unit",
        "weights",
        "symptoms",
        "average_units_per_second_each",
        "slowest",
        "jumps",
        "missing_records",
        "uncertain",
        "plan_problem",
    ]
    assert document["verdict"] == {"reason": "finished", "evidence": "exit code 0"}
    assert set(document["steps"][0]) == {"step", "loss", "tokens_per_second", "step_seconds"}
    measured = {"step", "loss", "bits_per_byte", "metrics", "train_loss"}
    assert set(document["evaluations"][0]) == measured
    assert set(document["epochs"][0]) == {"epoch", "train_loss", "validation_loss", "minutes"}
    assert set(document["memory"]) >= {"estimated", "measured", "by_phase"}
    names = {"peak_bytes", "device_bytes", "host_bytes"}
    assert set(document["memory"]["estimated"]) >= names
    assert set(document["memory"]["measured"]) >= names
    assert document["plan"]["train"]["batch_size"] == 4


def test_attempts_are_one_story(run: RunDirectory) -> None:
    made = report(run)
    assert [(s.step, round(s.loss or 0.0, 6)) for s in made.steps] == [
        (10, 4.9),
        (20, 4.8),
        (30, 4.2),
        (40, 4.1),
        (50, 4.0),
    ]
    assert [e.step for e in made.evaluations] == [20, 50]
    assert made.best_validation_loss == 3.5
    assert made.final_train_loss == 4.2
    assert made.unigram_loss == 6.5
    assert (made.total_minutes, made.average_epoch_minutes, made.attempts) == (2.5, 2.0, 2)


def test_measured_peaks_are_the_highest_of_all_attempts(run: RunDirectory) -> None:
    memory = report(run).memory
    assert memory.measured.peak_bytes == 800
    assert memory.measured.device_bytes == 800
    assert memory.measured.host_bytes == 9500
    assert memory.by_phase == {"train": 800, "evaluate": 600}


def test_the_estimate_made_at_launch_stands_beside_the_measurement(run: RunDirectory) -> None:
    table = estimate(run.read_plan(), BUDGET).table
    estimated = report(run).memory.estimated
    assert estimated.peak_bytes == table.peak_bytes
    assert estimated.device_bytes == table.device_bytes
    assert estimated.host_bytes == table.host_bytes


def test_a_stored_estimate_holds_the_peak_of_the_host_and_is_read_with_or_without_its_parts() -> (
    None
):
    table = estimate(Plan(), BUDGET).table
    stored = msgspec.json.decode(msgspec.json.encode(table))
    assert stored["host_bytes"] == table.host.peak
    del stored["host"]
    assert msgspec.convert(stored, type(table)).host_bytes == table.host_bytes
    more = msgspec.structs.replace(table, host=table.host.more(1 << 40))
    assert more.host_bytes == more.host.peak > 1 << 40


def test_a_run_without_an_estimate_says_none_not_zero(run: RunDirectory) -> None:
    (run.path / "estimate.json").unlink()
    estimated = report(run).memory.estimated
    assert estimated.peak_bytes is None


def test_the_receipt_can_be_read_back_and_holds_what_explains_a_difference(
    run: RunDirectory,
) -> None:
    written = write_receipt(run)
    read = files.read_struct(run.receipt_path, Receipt)
    assert read == written
    assert read is not None
    assert read.estimate is not None
    assert read.estimate.table.tier == "~"
    assert read.measured.peak_bytes == 800
    assert read.versions == {"jax": "0.10.2"}
    assert read.device_kind == "cpu"
    assert read.tokens_per_second == 130.0
    assert read.driver is None
    table = estimate(run.read_plan(), BUDGET).table
    assert read.estimate.table.band_bytes == table.band_bytes
    assert read.estimate.table.reserved_bytes == table.reserved_bytes
    assert read.measured.host_anonymous_bytes == 3166
    assert read.measured.host_shared_bytes == 1055
    assert read.measured.reserved_bytes is None
    assert "not measured on a CPU" in read.measured.missing["reserved_bytes"]


def test_an_estimate_stands_next_to_its_measurement_with_the_error_and_the_band() -> None:
    table = EstimatedTable(
        tier="~", peak_bytes=900, reserved_bytes=1000, device_bytes=1500, host_bytes=4000,
        band_bytes=(1400, 1600), phases={"forward": 500, "backward": 900, "evaluation": 300},
        phase_tiers={"backward": "="}, device_tier="✓",
    )  # fmt: skip
    measured = MemoryLine(peak_bytes=1000, device_bytes=1700, host_bytes=None, reserved_bytes=1000)
    rows = {r.name: r for r in compare(table, measured, {"compile": 700, "train": 1000})}
    assert rows["allocated"].error_percent == pytest.approx(-10)
    assert rows["allocated"].inside_band is None, "the band is the device column's"
    assert (rows["device"].inside_band, rows["device"].tier) == (False, "✓")
    assert rows["reserved"].error_percent == 0
    assert rows["host"].error_percent is None
    step = rows["training step"]
    assert (step.estimated_bytes, step.measured_bytes, step.tier) == (900, 1000, "=")
    assert "backward" in step.note
    assert (rows["evaluation"].estimated_bytes, rows["evaluation"].measured_bytes) == (300, None)
    assert "checkpoint" not in rows


def test_a_phase_without_an_estimate_has_a_row_if_it_held_most() -> None:
    table = EstimatedTable(tier="~", peak_bytes=900, device_bytes=900, host_bytes=1, phases={"backward": 900})  # fmt: skip
    measured = MemoryLine(peak_bytes=1200)

    def rows(**by_phase: int) -> dict[str, int | None]:
        found = compare(table, measured, {"train": 1000, **by_phase})
        return {one.name: one.measured_bytes for one in found}

    assert rows(sample=1200)["sample"] == 1200
    assert "sample" not in rows(sample=999)
    assert "evaluate" not in rows(evaluate=1200), "it stands beside the estimate of evaluation"
    assert rows(evaluate=1200)["evaluation"] == 1200


def test_each_phase_of_a_hybrid_run_stands_next_to_its_own_estimate() -> None:
    """The first step compiles and belongs to the first phase. A phase that never came has no measurement."""
    table = EstimatedTable(
        tier="~", peak_bytes=900, device_bytes=900, host_bytes=900,
        phases={"warmup": 800, "full": 900, "predict": 300, "correct": 900, "evaluation": 350},
    )  # fmt: skip
    by_phase = {"compile": 850, "warmup": 780, "full": 910, "predict": 310, "evaluate": 340}
    rows = compare(table, MemoryLine(), by_phase)
    found = {c.name: (c.estimated_bytes, c.measured_bytes) for c in rows}
    for column in ("allocated", "reserved", "device", "host"):
        del found[column]
    assert found == {
        "warmup": (800, 850), "full": (900, 910), "predict": (300, 310), "correct": (900, None),
        "evaluation": (350, 340),
    }  # fmt: skip


def test_a_run_that_died_of_memory_measured_only_a_lower_bound() -> None:
    table = EstimatedTable(
        tier="~", peak_bytes=900, device_bytes=900, host_bytes=1, band_bytes=(800, 1000)
    )
    low, high = (
        compare(table, MemoryLine(peak_bytes=n, device_bytes=n), {}, at_least=True)[0]
        for n in (500, 1100)
    )
    assert (low.at_least, low.inside_band) == (True, None)
    assert (high.at_least, high.inside_band) == (True, False)


@pytest.mark.parametrize(("kind", "judged"), [("cuda", 1), ("cpu", 10)])
def test_a_run_is_judged_after_its_first_steps(run: RunDirectory, kind: str, judged: int) -> None:
    """A start measures a part of what a step needs, and the heap of a CPU run grows in its first steps."""
    made = create_run(run.read_plan(), "short")
    files.write_atomic(made.path / "estimate.json", (run.path / "estimate.json").read_bytes())
    writer = _attempt(made, resumed_step=0, device_kind=kind)
    writer.write(_memory("build", 700, 800, 9000))
    for steps in range(judged + 1):
        allocated = report(made).memory.comparison[0]
        assert (allocated.name, allocated.measured_bytes) == ("allocated", 800)
        assert allocated.at_least == (steps < judged)
        assert allocated.inside_band == (None if steps < judged else False)
        written = memory_lines(report(made).memory)[1].split()
        assert written[-2:] == ["n/a", "n/a"] if steps < judged else written[-1] == "no"
        writer.write(_step(steps + 1, 5.0))


def test_a_run_that_measured_no_memory_has_one_line_instead_of_a_table(run: RunDirectory) -> None:
    made = create_run(run.read_plan(), "failed at once")
    _attempt(made, resumed_step=0)
    assert memory_lines(report(made).memory) == ["memory: nothing was measured"]
    files.write_atomic(made.path / "estimate.json", (run.path / "estimate.json").read_bytes())
    (line,) = [line for line in memory_lines(report(made).memory) if line.startswith("memory")]
    assert re.fullmatch(r"memory: nothing was measured, estimated at [~=✓] .*iB", line)


@pytest.mark.parametrize(
    ("message", "requested", "held"),
    [
        (
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.64 GiB of "
            "which 1.20 GiB is free. Including non-PyTorch memory, this process has 22.40 GiB memory in "
            "use. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 1.9 GiB is reserved",
            int(2.5 * 2**30),
            20 * 2**30,
        ),
        (
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 131072000 bytes. Error code 12 (Cannot allocate memory)",
            131_072_000,
            None,
        ),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 4096000 bytes.", 4_096_000, None),
        ("Out of memory while trying to allocate 12.00GiB.", 12 * 2**30, None),
        ("Unable to allocate 1.5 MiB for an array with shape (3,)", 3 * 2**19, None),
        ("std::bad_alloc", None, None),
    ],
)
def test_the_failed_request_is_read_from_each_frameworks_words(
    message: str, requested: int | None, held: int | None
) -> None:
    assert (requested_bytes(message), held_bytes(message)) == (requested, held)


def test_a_shortfall_is_the_highest_that_is_known_to_have_been_needed() -> None:
    assert shortfall("train", 100, 80, 50) == Shortfall(
        phase="train", held_bytes=80, requested_bytes=50, peak_bytes=100, needed_bytes=130
    )
    assert shortfall("train", 100, None, 50).needed_bytes == 100  # type: ignore[union-attr]
    assert shortfall("import", None, None, None) is None


def test_the_driver_is_what_the_kernel_module_says(tmp_path: Path) -> None:
    folder = tmp_path / "sys/module/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text("570.86.15\n")
    assert driver_version("gpu", tmp_path) == "570.86.15"
    assert driver_version("rocm", tmp_path) is None


def test_an_empty_run_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = create_run(Plan(), None)
    empty = report(made)
    assert empty.steps == ()
    assert empty.best_validation_loss is None
    assert empty.memory.measured.peak_bytes is None
    made.plan_path.write_text("nonsense")
    assert report(made).plan == {}
