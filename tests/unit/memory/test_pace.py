"""Finished runs of a device correct the time of a step there: those of the same setup in full, others by their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from memconsole.calibration import Receipts
from memconsole.devices.budget import budget
from memconsole.memory.answers.pace import Slowdown, likeness, paced, slowdown
from memconsole.memory.answers.receipts import Machine, Measured
from memconsole.memory.estimate import estimate
from memconsole.memory.table import Tier
from memconsole.plan.data.paths import anywhere
from memconsole.plan.plan import Plan, replace
from memconsole.runs.read.report.measured import SETTLED_STEPS
from memconsole.tui.draw.lines import plain as text_of
from memconsole.tui.plan.dialogs.launching import launchable
from memconsole.tui.plan.pricing import price
from memconsole.tui.plan.widgets.planned_speed import speed_lines
from memconsole.tui.views.plan_view import PlanView

HERE = Machine("this processor", {"torch": "2.13.0"})
PLAN = replace(Plan(), {"device.name": "cpu", "train.max_steps": 100})
OTHER = replace(PLAN, {"model.target_params": 8_000_000})
HOST = budget(PLAN, None)


def a_run(plan: Plan, rate: float | None, **changes: Any) -> Measured:
    known: dict[str, Any] = {
        "plan": plan, "device_name": HERE.device_name, "device_total_bytes": 2**34, "driver": None,
        "versions": HERE.versions, "peak_bytes": 2**27, "step_seconds": rate and 1000.0 / rate,
    }  # fmt: skip
    return Measured(**(known | changes))


def found(*runs: Measured) -> float | None:
    """The factor of `PLAN`, where every step is estimated at one second and has 1,000 units."""
    slower = slowdown(
        PLAN, HERE, runs, lambda plan: 1.0, lambda plan: plan.model.target_params or 1_000_000
    )
    return slower.factor if slower is not None else None


def sized(parameters: int) -> Plan:
    return replace(PLAN, {"model.target_params": parameters})


def test_one_run_of_a_model_of_like_size_tells_how_fast_the_device_is() -> None:
    assert found(a_run(OTHER, 800.0)) == pytest.approx(1.25)
    assert found() is None


def test_runs_of_the_setup_count_before_others_and_in_full() -> None:
    others = [a_run(OTHER, 500.0)] * 5
    longer = replace(PLAN, {"train.batch_size": 4})
    assert found(*others, a_run(longer, 800.0)) == 1.25
    assert found(*others, a_run(longer, 100.0)) == 10.0


@pytest.mark.parametrize("rate", [1e-3, 50.0, 20_000.0, 1e9])
def test_one_run_moves_plans_of_other_setups_by_a_factor_of_two_at_most(rate: float) -> None:
    slower = rate < 1000
    assert found(a_run(OTHER, rate)) == pytest.approx(2.0 if slower else 0.5)


def test_the_less_alike_two_models_are_in_size_the_less_one_corrects_the_other() -> None:
    sizes = (1_000_000, 9_000_000, 30_000_000, 90_000_000, 1_200_000_000)
    told = [found(a_run(replace(sized(size), {"train.seed": 1, "optimize.precision": "bf16"}), 100.0)) for size in sizes]  # fmt: skip
    assert told[0] == told[1] == pytest.approx(2.0)
    assert told[1] > told[2] > told[3] > 1.0  # type: ignore[operator]
    assert told[4] is None
    assert likeness(1_000_000, 30_000_000) == pytest.approx(likeness(30_000_000, 1_000_000))


def test_several_runs_outvote_one() -> None:
    good = [a_run(sized(size), 950.0) for size in (3_000_000, 5_000_000)]
    assert found(*good, a_run(OTHER, 50.0)) == pytest.approx(1 / 0.95)


def test_several_runs_that_agree_correct_in_full() -> None:
    slow = [a_run(sized(size), 200.0) for size in (3_000_000, 5_000_000, 8_000_000)]
    assert found(*slow) == pytest.approx(5.0)


def test_a_tiny_run_on_a_busy_machine_leaves_the_time_of_a_large_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Receipts, "_machine", lambda self, name, kind: Machine(HOST.name, HERE.versions)
    )
    large = replace(PLAN, {"model.name": "llama-3.2-1b", "model.target_params": None})
    plain, tiny = estimate(large, HOST), estimate(PLAN, HOST)
    written(tmp_path, "run", PLAN, tiny.tokens_per_second / 4.8, 50)
    receipts = Receipts(tmp_path)
    receipts.refresh()
    assert receipts.calibrate(large, plain).step_seconds == plain.step_seconds
    assert receipts.calibrate(PLAN, tiny).step_seconds == pytest.approx(4.8 * tiny.step_seconds)


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
    slower = paced(plain, Slowdown(2.0, measured=True))
    assert slower.time_tier is Tier.CALIBRATED
    assert slower.step_seconds == 2 * plain.step_seconds
    assert slower.tokens_per_second == plain.tokens_per_second / 2
    assert plain.run_seconds is not None
    assert slower.run_seconds == pytest.approx(plain.run_seconds + 100 * plain.step_seconds)
    assert slower.table is plain.table


def test_only_runs_of_the_same_kind_of_plan_mark_the_time_as_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Receipts, "_machine", lambda self, name, kind: Machine(HOST.name, HERE.versions)
    )
    written(tmp_path, "run", OTHER, estimate(OTHER, HOST).tokens_per_second / 2, SETTLED_STEPS)
    receipts = Receipts(tmp_path)
    receipts.refresh()

    def shown(plan: Plan) -> tuple[float, str]:
        plain = estimate(plan, HOST)
        found = receipts.calibrate(plan, plain)
        drawn = speed_lines(PlanView(plan, found, stale=False), 60, 3)
        return found.step_seconds / plain.step_seconds, text_of(drawn[0]).split("─ ")[1]

    assert shown(OTHER) == (pytest.approx(2.0), "✓ by runs here")
    other_optimizer = replace(OTHER, {"optimize.optimizer": "lion"})
    assert shown(other_optimizer) == (pytest.approx(2.0), "✓ by runs here")
    assert shown(PLAN) == (pytest.approx(2.0), "~ by other runs")
    assert shown(replace(PLAN, {"backend": "jax"})) == (1.0, "~ estimated")


def written(
    root: Path, name: str, plan: Plan, rate: float, steps: int, seconds: float | None = None
) -> None:
    (root / name).mkdir()
    receipt = {
        "device_name": HOST.name, "versions": HERE.versions, "plan": msgspec.to_builtins(plan),
        "steps": steps, "measured": {"peak_bytes": 2**27}, "tokens_per_second": rate,
        "step_seconds": seconds,
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

    assert seconds(SETTLED_STEPS) == pytest.approx(2 * plain.step_seconds)
    assert seconds(SETTLED_STEPS - 1) == plain.step_seconds


def test_a_launch_tells_the_time_and_the_memory_that_the_plan_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Receipts, "_machine", lambda self, name, kind: Machine(HOST.name, HERE.versions)
    )
    monkeypatch.setattr("memconsole.tui.plan.pricing._receipts", lambda: Receipts(tmp_path))
    plain = estimate(PLAN, HOST)
    written(tmp_path, "run", PLAN, plain.tokens_per_second / 2, SETTLED_STEPS)
    said, launched = price(PLAN, None).estimate, launchable(PLAN, None, None)
    assert said is not None
    assert launched.step_seconds == said.step_seconds == pytest.approx(2 * plain.step_seconds)
    assert launched.table.tier == said.table.tier == Tier.CALIBRATED
    assert launched.table.peak_bytes == said.table.peak_bytes != plain.table.peak_bytes


def test_padding_does_not_make_the_steps_of_a_plan_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose rows are half padding counts half of the tokens a second in steps that take as long."""
    machine = Machine(HOST.name, HERE.versions)
    monkeypatch.setattr(Receipts, "_machine", lambda self, name, kind: machine)
    plain = estimate(PLAN, HOST)
    written(tmp_path, "run", PLAN, plain.tokens_per_second / 2, 50, plain.step_seconds)
    receipts = Receipts(tmp_path)
    receipts.refresh()
    assert receipts.calibrate(PLAN, plain).step_seconds == pytest.approx(plain.step_seconds)


def test_runs_of_the_model_with_other_data_count_before_those_of_other_models() -> None:
    others = [a_run(OTHER, 250.0)] * 5
    isolated = replace(PLAN, {"data.isolate_documents": True})
    assert found(*others, a_run(isolated, 900.0)) == pytest.approx(1 / 0.9)


def test_a_model_named_by_a_relative_path_is_that_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 256,
    }  # fmt: skip
    (tmp_path / "m" / "llama").mkdir(parents=True)
    (tmp_path / "m" / "llama" / "config.json").write_bytes(msgspec.json.encode(config))
    machine = Machine(HOST.name, HERE.versions)
    monkeypatch.setattr(Receipts, "_machine", lambda self, name, kind: machine)
    monkeypatch.chdir(tmp_path)
    relative = replace(PLAN, {"model.name": "m/llama"})
    plain = estimate(relative, HOST)
    runs = tmp_path / "runs"
    runs.mkdir()
    kept = anywhere(relative)
    assert kept.model.name == str(tmp_path / "m" / "llama")
    written(runs, "run", kept, plain.tokens_per_second / 3, 50)
    receipts = Receipts(runs)
    receipts.refresh()
    for name in ("m/llama", "./m/llama", str(tmp_path / "m/llama")):
        plan = replace(PLAN, {"model.name": name})
        seen = receipts.calibrate(plan, plain)
        assert seen.step_seconds == pytest.approx(3 * plain.step_seconds), name
        assert seen.time_from == "by runs here"
        assert seen.table.band_from == "1 measured run of this setup"
