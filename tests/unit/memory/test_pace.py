"""Finished runs of a device correct the time of a step there, those of the same setup before others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from memconsole.calibration import Receipts
from memconsole.devices.budget import budget
from memconsole.memory.answers.pace import LEAST_STEPS, paced, slowdown
from memconsole.memory.answers.receipts import Machine, Measured
from memconsole.memory.estimate import estimate
from memconsole.memory.table import Tier
from memconsole.plan.plan import Plan, replace
from memconsole.tui.plan.dialogs.launching import launchable
from memconsole.tui.plan.pricing import price

HERE = Machine("this processor", {"torch": "2.13.0"})
PLAN = replace(Plan(), {"device.name": "cpu", "train.max_steps": 100})
OTHER = replace(PLAN, {"model.target_params": 8_000_000})
HOST = budget(PLAN, None)


def a_run(plan: Plan, rate: float | None, **changes: Any) -> Measured:
    known: dict[str, Any] = {
        "plan": plan, "device_name": HERE.device_name, "device_total_bytes": 2**34, "driver": None,
        "versions": HERE.versions, "peak_bytes": 2**27, "units_per_second": rate,
    }  # fmt: skip
    return Measured(**(known | changes))


def found(*runs: Measured) -> float | None:
    """The slowdown of `PLAN`, where every plan is estimated at 1,000 units per second."""
    return slowdown(PLAN, HERE, runs, lambda plan: 1000.0)


def test_one_run_of_another_setup_tells_how_fast_the_device_is() -> None:
    assert found(a_run(OTHER, 500.0)) == 2.0
    assert found() is None


def test_runs_of_the_setup_count_before_others() -> None:
    others = [a_run(OTHER, 500.0)] * 5
    longer = replace(PLAN, {"train.batch_size": 4})
    assert found(*others, a_run(longer, 800.0)) == 1.25


@pytest.mark.parametrize(
    "stranger",
    [
        a_run(replace(PLAN, {"backend": "jax"}), 500.0),
        a_run(PLAN, 500.0, device_name="another processor"),
        a_run(PLAN, 500.0, versions={"torch": "2.0.0"}),
        a_run(PLAN, None),
    ],
    ids=["backend", "device", "versions", "no rate"],
)
def test_other_runs_change_nothing(stranger: Measured) -> None:
    assert found(stranger) is None


def test_every_time_of_the_steps_changes_and_the_start_of_the_run_does_not() -> None:
    plain = estimate(PLAN, HOST)
    slower = paced(plain, 2.0)
    assert slower.time_tier is Tier.CALIBRATED
    assert slower.step_seconds == 2 * plain.step_seconds
    assert slower.tokens_per_second == plain.tokens_per_second / 2
    assert plain.run_seconds is not None
    assert slower.run_seconds == pytest.approx(plain.run_seconds + 100 * plain.step_seconds)
    assert slower.table is plain.table


def written(root: Path, name: str, plan: Plan, rate: float, steps: int) -> None:
    (root / name).mkdir()
    receipt = {
        "device_name": HOST.name, "versions": HERE.versions, "plan": msgspec.to_builtins(plan),
        "steps": steps, "measured": {"peak_bytes": 2**27}, "tokens_per_second": rate,
    }  # fmt: skip
    (root / name / "receipt.json").write_bytes(msgspec.json.encode(receipt))


def test_receipts_of_whole_runs_are_read_and_those_of_a_few_steps_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(HOST.name, HERE.versions)
    monkeypatch.setattr(Receipts, "_machine", lambda self, name, kind: machine)
    plain = estimate(PLAN, HOST)

    def seconds(steps: int) -> float:
        root = tmp_path / str(steps)
        root.mkdir()
        written(root, "run", OTHER, estimate(OTHER, HOST).tokens_per_second / 2, steps)
        receipts = Receipts(root)
        receipts.refresh()
        return receipts.calibrate(PLAN, plain).step_seconds

    assert seconds(LEAST_STEPS) == pytest.approx(2 * plain.step_seconds)
    assert seconds(LEAST_STEPS - 1) == plain.step_seconds


def test_a_launch_tells_the_time_and_the_memory_that_the_plan_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Receipts, "_machine", lambda self, name, kind: Machine(HOST.name, HERE.versions)
    )
    monkeypatch.setattr("memconsole.tui.plan.pricing._receipts", lambda: Receipts(tmp_path))
    plain = estimate(PLAN, HOST)
    written(tmp_path, "run", PLAN, plain.tokens_per_second / 2, LEAST_STEPS)
    said, launched = price(PLAN, None).estimate, launchable(PLAN, None)
    assert said is not None
    assert launched.step_seconds == said.step_seconds == pytest.approx(2 * plain.step_seconds)
    assert launched.table.tier == said.table.tier == Tier.CALIBRATED
    assert launched.table.peak_bytes == said.table.peak_bytes != plain.table.peak_bytes
