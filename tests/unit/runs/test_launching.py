"""What is told before a run starts, and the name that it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memconsole.announcing import default_name, free_name, launch_name, launch_rows, name_words
from memconsole.cli.main import cli
from memconsole.cli.plans.plan_words import document
from memconsole.cli.plans.plan_words import text as plan_text
from memconsole.devices.budget import budget
from memconsole.memory.estimate import estimate
from memconsole.memory.run_time import steps_are_known
from memconsole.plan.data.counted import keep_counted
from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.run_store import create_run
from memconsole.tui.plan.widgets.plan_summary import _train
from memconsole.tui.views.plan_view import PlanView


@pytest.fixture(autouse=True)
def _own_runs_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def changed(**changes: Any) -> Plan:
    return replace(Plan(), {key.replace("__", "."): value for key, value in changes.items()})


def told(plan: Plan) -> dict[str, str]:
    return dict(launch_rows(plan, estimate(plan, budget(plan, None))))


def test_a_run_without_a_name_gets_one_that_no_other_run_has() -> None:
    plan = changed(backend="jax", data__source="/some/where/my text.txt")
    names = []
    for _ in range(3):
        names.append(default_name(plan))
        create_run(plan, names[-1])
    assert names == ["stories-my-text-jax", "stories-my-text-jax-2", "stories-my-text-jax-3"]
    assert default_name(changed(optimize__lora_rank=4), {"x"}).endswith("-lora")


def test_steps_and_tokens_of_a_run_are_those_it_will_take() -> None:
    fixed = told(changed(device__name="cpu", train__max_steps=120, train__batch_size=4))
    assert fixed["length"] == "120 steps, 61.4 k tokens"
    assert fixed["weights"].startswith("from scratch")
    epochs = told(changed(device__name="cpu", train__epochs=1))
    assert epochs["length"].startswith("1 epoch: about ")
    assert " a step, " in epochs["time"]
    assert " of it to start" in epochs["time"]


def test_a_length_that_is_not_known_is_said_to_be_unknown(tmp_path: Path) -> None:
    unread = changed(device__name="cpu", data__source="hf://somebody/something")
    assert told(unread)["length"] == "3 epochs; the steps are known once the data are read"
    assert told(unread)["time"].endswith(" a step")


def test_a_precision_that_is_slow_here_is_told_before_the_launch() -> None:
    narrow = changed(backend="jax", device__name="cpu", optimize__precision="bf16")
    assert told(narrow)["speed"].startswith("optimize.precision = bf16: XLA on a CPU computes")
    assert "speed" not in told(changed(backend="jax", device__name="cpu"))
    assert "speed" not in told(replace(narrow, {"device.name": "rtx-3060-12gb"}))


def test_steps_are_called_a_guess_until_a_run_has_counted_the_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of text\n" * 4000)
    plan = changed(device__name="cpu", data__source=str(text))
    guess = "guessed from the size of the data"
    for known, keep in ((False, lambda: None), (True, lambda: keep_counted(plan, 20_000))):
        keep()
        found = estimate(plan, budget(plan, None))
        length, printed, shown = (
            told(plan)["length"],
            next(line for line in plan_text(plan, found).splitlines() if line.startswith("run ")),
            " ".join(_train(PlanView(plan, estimate=found, stale=False))),
        )
        assert steps_are_known(plan) is known
        assert ("about " in length, guess in length) == (not known, not known)
        assert (f"run ~{found.run_steps:,}" in printed, guess in printed) == (not known, not known)
        assert ("epochs of ~" in shown) == (not known)
        assert document(plan, found)["run_steps_known"] is known


def test_a_proposed_name_gets_a_number_if_a_run_has_it() -> None:
    assert free_name("x-again", {"x"}) == "x-again"
    assert free_name("x-again", {"x-again", "x-again-2"}) == "x-again-3"
    assert free_name("x" * 80, {"x" * 80}) == "x" * 76 + "-2"


def test_a_new_run_gets_a_number_if_another_run_has_its_name() -> None:
    for expected in ("prof", "prof-2"):
        run = create_run(Plan(), launch_name(Plan(), " prof "))
        assert run.name == expected
    assert name_words(run, "prof") == 'another run is called "prof": this one is prof-2'
    assert name_words(run, " prof-2 ") == name_words(run, None) == ""
    done = CliRunner().invoke(cli, ["train", "--name", "latest"])
    assert str(done.exception).startswith('the name "latest" stands for the newest run')
    assert done.output == ""


def test_a_name_that_is_changed_or_empty_is_not_taken_in_silence() -> None:
    """`runs rename` prints the name that it kept, and refuses an empty one, too."""
    for asked, kept in (("a\nb", "a b"), ("x" * 90, "x" * 79 + "…")):
        run = create_run(Plan(), launch_name(Plan(), asked))
        assert run.name == kept
        words = f"a name is one line of at most 80 characters: kept as {kept}"
        assert name_words(run, asked) == words
    secret = "hf_" + "a" * 34
    run = create_run(Plan(), launch_name(Plan(), secret))
    assert (
        name_words(run, secret) == f"the name looks like a token or a password: kept as {run.name}"
    )
    for empty in ("", " "):
        done = CliRunner().invoke(cli, ["train", "--name", empty])
        assert str(done.exception) == "a name is one line of text; this one is empty"
