"""Remedies are measured by the run that died: its need corrects the estimate, its room the budget."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from memconsole.calibration import calibrated_here
from memconsole.devices.budget import budget as budget_of
from memconsole.memory.answers.advice import remedies
from memconsole.memory.answers.correction import OutOfMemoryRun, correction
from memconsole.memory.estimate import estimate, table_of
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan
from memconsole.remedies import out_of_memory_run, remedies_of
from memconsole.runs.read.report.measured import SETTLED_STEPS
from memconsole.runs.record.failures.shortfall import shortfall
from memconsole.runs.record.run_store import runs_root

GIB = 2**30
PLAN = plans.replace(
    Plan(), {"model.name": "smollm2-135m", "data.sequence_length": 1024, "train.batch_size": 16}
)


def device(usable: int) -> Budget:
    return Budget(
        name="card", kind="gpu", memory_label="VRAM", total_bytes=usable, usable_bytes=usable,
        why="test", bandwidth_bytes_per_second=1e12, peak_flops={"fp32": 2e13, "bf16": 1e14},
    )  # fmt: skip


def test_a_run_that_needed_half_as_much_again_raises_every_saving_by_that() -> None:
    budget = device(12 * GIB)
    table = table_of(PLAN, budget)
    ran = OutOfMemoryRun(needed_bytes=table.peak_bytes * 3 // 2, held_bytes=11 * GIB)
    plain = {r.label: r for r in remedies(PLAN, budget)}
    corrected = {r.label: r for r in remedies(PLAN, budget, ran)}
    shared = set(plain) & set(corrected)
    assert len(shared) >= 3
    for label in shared:
        after = table_of(plans.replace(PLAN, corrected[label].changes), budget)
        tensors = table.peak_bytes - after.peak_bytes
        assert corrected[label].saves_bytes - plain[label].saves_bytes == pytest.approx(
            tensors / 2, abs=2
        )
        assert plain[label].fits or not corrected[label].fits


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_fitting_means_the_corrected_need_within_the_room(factor: float) -> None:
    budget = device(12 * GIB)
    table = table_of(PLAN, budget)
    ran = OutOfMemoryRun(needed_bytes=int(table.peak_bytes * factor), held_bytes=10 * GIB)
    for remedy in remedies(PLAN, budget, ran):
        after = table_of(plans.replace(PLAN, remedy.changes), budget)
        need = after.peak_bytes * factor + after.device_bytes - after.peak_bytes
        assert remedy.fits == (need <= budget.usable_bytes)
        room = budget.usable_bytes - (after.at_most_bytes - after.device_bytes)
        assert (remedy.verdict is Verdict.FITS) == (int(need) <= room)


def test_a_run_that_died_with_room_in_the_budget_shows_that_the_room_is_not_there() -> None:
    """80 GiB were thought free; the run got 9 GiB and no more."""
    budget = device(80 * GIB)
    table = table_of(PLAN, budget)
    assert table.fits
    by = correction(table, OutOfMemoryRun(needed_bytes=10 * GIB, held_bytes=9 * GIB))
    assert by.room_bytes == 9 * GIB + table.device_bytes - table.peak_bytes
    assert by.factor == 1.0, "it died below its estimate, which says nothing against it"
    assert by.verdict(table) is Verdict.DOES_NOT_FIT
    found = remedies(PLAN, budget, OutOfMemoryRun(needed_bytes=10 * GIB, held_bytes=9 * GIB))
    assert any(r.fits for r in found)
    assert any(not r.fits for r in found)


def test_a_budget_that_the_estimate_exceeds_explains_the_death_however_little_was_measured() -> (
    None
):
    budget = device(12 * GIB)
    table = table_of(PLAN, budget)
    assert not table.fits
    by = correction(table, OutOfMemoryRun(needed_bytes=GIB, held_bytes=GIB))
    assert by.room_bytes == budget.usable_bytes


def test_a_death_in_evaluation_is_held_against_the_estimate_of_evaluation() -> None:
    table = table_of(PLAN, device(12 * GIB))
    need = int(table.phases["evaluation"] * 1.5)
    lacked = shortfall("evaluate", need, None, None)
    ran = out_of_memory_run(lacked)
    assert ran is not None
    assert ran.phase == "evaluation"
    assert correction(table, ran).factor == pytest.approx(1.5, rel=1e-6)
    assert out_of_memory_run(None) is None


def test_a_change_that_a_finished_run_has_tried_is_judged_by_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan and the change are both estimated at twice what runs measure. Half of the estimate is available."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    plan = plans.replace(PLAN, {"device.name": "cpu", "optimize.fused_loss": False})
    chunked = plans.replace(plan, {"optimize.fused_loss": True})
    host = budget_of(plan, None)
    needed = table_of(plan, host).peak_bytes // 2
    room = msgspec.structs.replace(host, usable_bytes=table_of(plan, host).device_bytes // 2)
    monkeypatch.setattr("memconsole.remedies.budget", lambda *_: room)
    for name, of, measured in (
        ("dead", plan, {"shortfall": {"needed_bytes": needed}, "measured": {}}),
        ("done", chunked, {"measured": {"peak_bytes": table_of(chunked, host).peak_bytes // 2}}),
    ):
        folder = runs_root() / name
        folder.mkdir(parents=True)
        receipt = {
            "device_name": host.name, "versions": {"torch": version("torch")},
            "plan": msgspec.to_builtins(of), "steps": SETTLED_STEPS, **measured,
        }  # fmt: skip
        (folder / "receipt.json").write_bytes(msgspec.json.encode(receipt))
    shown = calibrated_here(chunked, estimate(chunked, room)).table
    assert shown.fits, "as the plan screen says"
    lacked = shortfall("forward", needed, None, None)
    found = {r.key: r for r in remedies_of(plan, lacked, None)}
    assert found["optimize.fused_loss"].fits


def test_a_death_in_evaluation_is_held_against_the_calibrated_estimate_of_evaluation() -> None:
    table = table_of(PLAN, device(12 * GIB))
    calibrated = msgspec.structs.replace(table, peak_bytes=table.peak_bytes * 2)
    need = int(table.phases["evaluation"] * 3)
    ran = OutOfMemoryRun(needed_bytes=need, held_bytes=GIB, phase="evaluation")
    assert correction(calibrated, ran).factor == pytest.approx(1.5, rel=1e-6)
