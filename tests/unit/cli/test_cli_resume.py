"""The settings that `memconsole resume --set` takes and refuses."""

import errno
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memconsole.cli.from_run import plan_from
from memconsole.cli.main import cli
from memconsole.plan.models.files import TOKENIZER_JSON
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.training.resuming import MAY_CHANGE
from memconsole.runs.act import launch, restart
from memconsole.runs.act.delete import delete_run
from memconsole.runs.record import consent
from memconsole.runs.record.checkpoints.manifest import STATE
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.processes import locks
from memconsole.runs.record.run_store import create_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run of 100 steps that is at step 39."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = create_run(replace(Plan(), {"train.max_steps": 100, "device.name": "cpu"}))
    (made.checkpoints_path / "step-000000039").mkdir()
    return made


def resumed(run: RunDirectory, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["resume", run.id, *arguments])


@pytest.mark.parametrize("steps", [1, 39])
def test_a_length_that_the_run_has_trained_already_is_refused(
    run: RunDirectory, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "resume", lambda *ignored, **options: pytest.fail("it was resumed"))
    error = resumed(run, "--set", f"train.max_steps={steps}").exception
    assert isinstance(error, PlanError)
    assert "the run is at step 39 already; expected more than 39" in str(error)


@pytest.mark.parametrize("steps", [40, 100])
def test_a_longer_or_the_same_length_is_taken(
    run: RunDirectory, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "resume", lambda *ignored, **options: 2)
    output = resumed(run, "--set", f"train.max_steps={steps}").output
    assert "attempt 2" in output
    assert ("goes on with train.max_steps 100 → 40" in output) == (steps == 40)


def test_a_run_that_begins_again_may_have_any_length(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "resume", lambda *ignored, **options: 2)
    assert "attempt 2" in resumed(run, "--from-scratch", "--set", "train.max_steps=5").output


@pytest.mark.parametrize(("epochs", "taken"), [(2, False), (3, True), (9, True)])
def test_a_run_is_not_ended_in_an_epoch_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int, taken: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "resume", lambda *ignored, **options: 2)
    run = create_run(replace(Plan(), {"train.epochs": 5, "device.name": "cpu"}))
    checkpoint = run.checkpoints_path / "step-000000039"
    checkpoint.mkdir()
    (checkpoint / STATE).write_text(json.dumps({"progress": {"epoch": 3}}))
    result = resumed(run, "--set", f"train.epochs={epochs}")
    if taken:
        assert "attempt 2" in result.output
    else:
        assert "the run is in epoch 3 already; expected 3 or more" in str(result.exception)


def test_the_help_and_the_page_list_what_the_refusal_lists(run: RunDirectory) -> None:
    refused = str(resumed(run, "--set", "model.name=gpt2").exception)
    assert f"{MAY_CHANGE} may change" in refused
    shown = CliRunner().invoke(cli, ["resume", "--help"]).output
    assert f"{MAY_CHANGE} may change" in " ".join(shown.split())
    page = Path(__file__).parents[3] / "docs" / "runs.md"
    assert f"{MAY_CHANGE} may change" in page.read_text(encoding="utf-8")


def test_a_refused_resume_changes_nothing_of_one_that_is_starting(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (replace(run.read_plan(), {"train.max_steps": n}) for n in (60, 400))

    def start(run: RunDirectory, mode: str) -> int:
        with pytest.raises(RunError, match="is starting; attach to it, or stop it first"):
            launch.resume(run, changed_data=True, changed=second)
        with pytest.raises(RunError, match="is starting"):
            delete_run(run)
        return 2

    monkeypatch.setattr(launch, "start_supervisor", start)
    monkeypatch.setattr(restart, "check_checkpoint", lambda run: None)
    assert launch.resume(run, changed=first) == 2
    assert run.read_plan() == first
    assert consent.agreed(run) is None
    monkeypatch.setattr(launch, "start_supervisor", lambda run, mode: 3)
    assert launch.resume(run, changed=second) == 3, "the first one has let go"


@pytest.mark.parametrize(("name", "why"), [("supervisor.lock", "symbolic"), ("attempts", "Not a")])
def test_a_file_of_the_run_that_cannot_be_used_is_named(
    run: RunDirectory, name: str, why: str
) -> None:
    path = run.path / name
    if path.is_dir():
        path.rmdir()
        path.touch()
    else:
        path.symlink_to("elsewhere")
    with pytest.raises(RunError, match=f"run {run.id} cannot be started: {path}.*: .*{why}"):
        launch.start_supervisor(run, "--resume")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "Read-only file system"),
        (errno.ENOSPC, "left on device; free some room there"),
    ],
)
def test_only_a_full_disk_is_to_be_freed(
    run: RunDirectory, number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(locks, "_open", refused)
    with pytest.raises(RunError, match=f"{run.path} cannot be written: .*{words}$"):
        launch.resume(run)


def test_a_plan_from_a_run_has_no_settings_of_a_tokenizer_that_was_made(
    run: RunDirectory,
) -> None:
    """The run's tokenizer holds them, and a plan with a given tokenizer may not have them."""
    given = {"data.lowercase": True, "data.template": "equipment", "data.code_field": "codes"}
    run.write_plan(replace(run.read_plan(), given))
    (run.path / TOKENIZER_JSON).write_text("{}")
    data = plan_from(run.id).data
    assert data.tokenizer == str(run.path / TOKENIZER_JSON)
    assert (data.lowercase, data.code_field, data.characters) == (False, None, False)
    assert data.template == "equipment"
