"""Plans and runs that an earlier version wrote are read as it read them."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from memconsole import typed_json
from memconsole.cli.main import cli
from memconsole.plan import plan as plans
from memconsole.plan import plan_file
from memconsole.plan.plan import Plan
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.report.receipt import Receipt
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import find_run, make_runs_root
from memconsole.tui.run.predictions import kept_estimate

DATA = Path(__file__).parents[2] / "data"
RUN = DATA / "golden_run"
"""A finished run of 14 steps, without its checkpoints."""
PLAN_KEYS = {
    "backend", "device", "parameters", "trainable_parameters", "tier", "components", "phases",
    "phase_tiers", "peak_phase", "peak_bytes", "reserved_bytes", "device_bytes", "host_bytes",
    "reserved_tier", "device_tier", "host_tier", "band_bytes", "band_from", "least_bytes", "source",
    "caveat", "exact_problem", "fits", "toggles", "step_seconds", "tokens_per_second", "mfu",
    "epoch_minutes", "rows",
}  # fmt: skip
DEVICE_KEYS = {"name", "kind", "memory", "total_bytes", "usable_bytes", "usable_because"}
COMPONENT_KEYS = {"name", "bytes", "tier", "phases", "phase_tiers"}
TOGGLE_KEYS = {"key", "value", "saves_bytes", "tier", "time_factor", "reason", "available"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    id = json.loads((RUN / "run.json").read_bytes())["id"]
    root = make_runs_root()
    shutil.copytree(RUN, root / id)
    (root / id).chmod(0o700)
    return find_run(id)


def printed(*arguments: str) -> Any:
    done = CliRunner().invoke(cli, list(arguments))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def missing(old: Any, new: Any, at: str = "") -> list[str]:
    """Where `new` lacks what `old` has, or has it otherwise; more keys may be there."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key, value in old.items()
            for line in (
                missing(value, new[key], f"{at}.{key}") if key in new else [f"{at}.{key} is gone"]
            )
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for n, (a, b) in pairs for line in missing(a, b, f"{at}[{n}]")]
    return [] if old == new else [f"{at}: {old!r} became {new!r}"]


def test_every_key_of_an_old_plan_file_has_its_value() -> None:
    text = (DATA / "golden_plan.toml").read_text(encoding="utf-8")
    plan = plan_file.loads(text)
    document = tomllib.loads(text)
    settings = {"backend": document.pop("backend")}
    for section, values in document.items():
        settings |= {f"{section}.{key}": value for key, value in values.items()}
    assert len(settings) == 62
    assert {key: plans.get(plan, key) for key in settings} == settings
    usual = Plan()
    assert [key for key in settings if plans.get(usual, key) == settings[key]] == []
    assert plan_file.loads(plan_file.dumps(plan)) == plan


def test_the_plan_of_an_old_run_is_priced_under_the_old_names(run: RunDirectory) -> None:
    found = printed("plan", "--plan", str(run.path / "plan.toml"), "--json")
    assert found.keys() >= PLAN_KEYS
    assert found["device"].keys() >= DEVICE_KEYS
    assert all(row.keys() >= COMPONENT_KEYS for row in found["components"])
    assert all(row.keys() >= TOGGLE_KEYS for row in found["toggles"])


def test_the_report_of_an_old_run_is_what_it_was(run: RunDirectory) -> None:
    old = json.loads((DATA / "golden_report.json").read_bytes())
    assert missing(old, printed("report", run.id, "--json")) == []


def test_an_old_run_is_listed_as_it_was(run: RunDirectory) -> None:
    old = json.loads((DATA / "golden_runs.json").read_bytes())
    assert missing(old, printed("runs", "--json")) == []


def test_an_old_state_file_is_gone_on_from_and_says_what_the_log_says(run: RunDirectory) -> None:
    attached = Follower(run)
    assert (attached.state.step, attached.state.loss) == (14, 6.591632925230881)
    run.state_path.unlink()
    read = Follower(run)
    assert read.state.step == 0
    told, known = read.poll(), attached.poll()
    # Older state files do not hold these sums; the run's speed is that of its last steps then.
    assert known.units_per_second == known.facts.tokens_per_second
    sums = {"trained_units": 0.0, "trained_seconds": 0.0, "untrained_seconds": 0.0}
    facts = msgspec.structs.replace(told.facts, **sums)
    # Nor do they hold samples before the newest one, stages, or curves of norm, rate and speed.
    newer = {
        name: getattr(known, name) for name in ("series", "recent_series", "samples", "stages")
    }
    assert len(told.series.learning_rate.steps) > len(known.series.learning_rate.steps)
    assert msgspec.structs.replace(told, facts=facts, **newer) == known
    facts = attached.poll().facts
    assert (facts.epoch, facts.parameters, facts.peak_bytes) == (2, 99600, 7168000)


def test_an_old_receipt_is_read(run: RunDirectory) -> None:
    receipt = typed_json.decode((run.path / "receipt.json").read_bytes(), Receipt)
    assert (receipt.steps, receipt.measured.peak_bytes) == (14, 7168000)
    assert [one.name for one in receipt.comparison] != []


def test_the_estimate_kept_with_an_old_run_is_its_prediction(run: RunDirectory) -> None:
    found = kept_estimate(run)
    assert found is not None
    assert (
        found.table.peak_bytes
        == json.loads((RUN / "estimate.json").read_bytes())["table"]["peak_bytes"]
    )
