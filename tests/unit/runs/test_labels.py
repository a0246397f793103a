"""Names, tags and notes of runs; what is deleted; and the words and figures that lists tell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.plan.plan import Plan, replace
from memconsole.runs.read.follow import Follower, status
from memconsole.runs.read.report.report import report
from memconsole.runs.read.shown.words import KILLED, REFUSED, ended_why, ended_words, state_word
from memconsole.runs.record import files, labels
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.processes import locks
from memconsole.runs.record.records import ExitRecord
from memconsole.runs.record.run_store import create_run, find_run, list_runs
from memconsole.runs.record.states import LIVE, State, Verdict


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def command(*arguments: str, code: int = 0, typed: str = "") -> str:
    done = CliRunner().invoke(cli, ["runs", *arguments], input=typed)
    error = f"{done.exception}"
    assert (done.exit_code == 0) == (code == 0), done.output + error
    return done.output if code == 0 else error


def ended(run: RunDirectory, reason: str, **changes: object) -> RunDirectory:
    verdict = Verdict(reason=reason, evidence="test")
    number = run.newest_attempt() or run.new_attempt()
    record = ExitRecord(verdict=verdict, time_wall=1.0)
    files.write_struct(run.attempt_path(number) / "exit.json", record)
    return run


def step(number: int, speed: float, seconds: float) -> events.Step:
    return events.Step(
        step=number, epoch=1, loss=2.0, learning_rate=1e-3, gradient_norm=1.0, tokens=0,
        tokens_per_second=speed, step_seconds=seconds,
    )  # fmt: skip


def test_a_list_without_runs_says_why() -> None:
    for arguments in ((), ("--live",), ("--tag", "paper")):
        assert command(*arguments) == "no runs yet: memconsole train starts one\n"
    ended(create_run(Plan()), "finished")
    assert command("--live") == "no run is live\n"
    assert command("--tag", "paper") == "no such run\n"


def test_a_renamed_run_keeps_its_paths_while_it_trains_and_is_found_by_its_new_name() -> None:
    run = create_run(Plan(), "first try")
    lock = locks.take(run.supervisor_lock)
    try:
        before = sorted(path.relative_to(run.path) for path in run.path.rglob("*"))
        record = run.record_path.read_bytes()
        follower = Follower(run)
        assert follower.poll().name == "first try"
        assert "is called the good one" in command("rename", run.id, "the good one")
        assert follower.poll().name == "the good one"
        after = sorted(path.relative_to(run.path) for path in run.path.rglob("*"))
        assert [path for path in after if path not in before] == [Path(labels.FILE)]
        assert run.record_path.read_bytes() == record
        assert find_run("the good one") == run
        assert report(run).name == "the good one"
    finally:
        lock.release()


def test_a_long_name_is_cut_in_the_table_alone() -> None:
    run = create_run(Plan(), "x" * 300)
    table = command()
    assert f"  {'x' * 39}…  " in table
    assert json.loads(command("--json"))[0]["name"] == run.name


def test_a_run_is_not_given_a_name_that_means_another_run() -> None:
    first, second = create_run(Plan(), "first"), create_run(Plan(), "second")
    refused = command("rename", "first", "second", code=2)
    assert refused == f'run {second.id} has the name "second"; expected a name that no run has'
    assert 'the name "latest" stands for the newest run' in command(
        "rename", "first", "latest", code=2
    )
    assert "stands for the run that has this id" in command("rename", "first", second.id, code=2)
    for name in ("..", "--json"):
        assert f'the name "{name}" begins with - or has only dots' in command(
            "rename", "first", "--", name, code=2
        )
    assert first.name == "first"
    assert "is called first" in command("rename", "first", "first")


def test_tags_and_notes_are_added_taken_away_listed_and_filtered_by() -> None:
    run, other = create_run(Plan(), "a"), create_run(Plan(), "b")
    assert "paper, sweep" in command("tag", run.id, "paper", "sweep", "paper")
    assert "sweep" not in command("tag", run.id, "--remove", "sweep")
    command("note", run.id, "rate was\ntoo high")
    assert command("note", run.id) == "rate was\ntoo high\n"
    found = json.loads(command("--json", "--tag", "paper"))
    assert [(one["id"], one["tags"]) for one in found] == [(run.id, ["paper"])]
    listed = command("--tag", "paper")
    assert f"{run.id}: rate was too high" in listed
    assert other.id not in listed
    made = report(run)
    assert (made.tags, made.note) == (("paper",), "rate was\ntoo high")
    command("note", run.id, "")
    assert "has no note" in command("note", run.id)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rename", "R", " "), "one line of text"),
        (("tag", "R", "two words"), "one word of at most 30"),
        (("tag", "R", "a,b"), "without a comma"),
        (("tag", "R", "x" * 31), "at most 30"),
        (("tag", "R", "--remove", "none"), "the run has no tags"),
        (("tag", "R", *map(str, range(17))), "at most 16"),
        (("note", "R", "x" * 2001), "at most 2,000"),
    ],
)
def test_a_label_that_cannot_be_kept_is_refused_in_one_line(
    arguments: tuple[str, ...], words: str
) -> None:
    run = create_run(Plan())
    said = command(*(run.id if word == "R" else word for word in arguments), code=2)
    assert words in said
    assert "\n" not in said
    assert not (run.path / labels.FILE).exists()


def test_labels_hold_no_secret_and_no_control_character() -> None:
    run = create_run(Plan())
    command("rename", run.id, "a\x1b]0;t\x07b")
    command("note", run.id, "hf_" + "a" * 34)
    assert "\x1b" not in run.name
    assert "a" * 34 not in labels.read_labels(run.path).note
    (run.path / labels.FILE).write_text("{not json")
    assert labels.read_labels(run.path) == labels.Labels()
    assert run.name == run.id


def test_delete_asks_and_spares_what_trains_and_what_a_training_run_started_from() -> None:
    base, kept = ended(create_run(Plan(), "base"), "finished"), create_run(Plan(), "kept")
    saved = base.checkpoints_path / "step-000000001"
    saved.mkdir()
    begun = create_run(replace(Plan(), {"model.weights": str(saved)}), "begun")
    lock = locks.take(begun.supervisor_lock)
    try:
        assert "stop it first" in command("delete", "begun", "--yes", code=2)
        said = command("delete", "kept", "base", "--yes", code=2)
        assert f"run {begun.id} started from its weights and is training" in said
        assert len(list_runs()) == 3, "all or none"
    finally:
        lock.release()
    ended(begun, "finished")
    ended(kept, "finished")
    command("delete", "base", typed="n\n", code=1)
    assert base.path.exists()
    assert f"these started from its weights: {begun.id}" in command("delete", "base", typed="y\n")
    assert base not in list_runs()
    command("delete", "kept", "begun", "--yes")
    assert list_runs() == []


def test_deleting_several_runs_reads_each_plan_once_and_sees_a_run_that_began_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"old-{number}" for number in range(4)]
    runs = [ended(create_run(Plan(), name), "finished") for name in names]
    base, plans = runs[-1], RunDirectory.read_given_plan
    saved = base.checkpoints_path / "step-000000001"
    saved.mkdir()
    read: list[RunDirectory] = []
    monkeypatch.setattr(RunDirectory, "read_given_plan", lambda run: read.append(run) or plans(run))
    taken = []

    def launched(*arguments: object, **options: object) -> None:
        late = create_run(replace(Plan(), {"model.weights": str(saved)}), "late")
        taken.append(locks.take(late.supervisor_lock))

    monkeypatch.setattr("memconsole.cli.runs.keeping.ask", launched)
    try:
        said = command("delete", *names, code=2)
        assert f"run {base.id}: run {find_run('late').id} started from its weights" in said
    finally:
        taken[0].release()
    assert list_runs() == [find_run("late"), base]
    assert sorted(run.id for run in read) == sorted(run.id for run in [*runs, find_run("late")])


@pytest.mark.parametrize(
    ("reason", "checkpoint", "word", "words"),
    [
        ("finished", False, "finished", "finished"),
        ("stopped", True, "stopped", "stopped"),
        ("killed", False, "killed", "killed"),
        ("bad_plan", False, "refused", "refused"),
        ("bad_plan", True, "failed", "failed: bad plan"),
        ("out_of_memory", False, "failed", "failed: out of memory"),
        ("rebooted", True, "lost", "lost: rebooted"),
    ],
)
def test_the_word_for_a_state_is_the_same_in_every_place(
    reason: str, checkpoint: bool, word: str, words: str
) -> None:
    run = create_run(Plan(), "one")
    if checkpoint:
        (run.checkpoints_path / "step-000000001").mkdir()
    ended(run, reason)
    for seen in (status(run), Follower(run).poll()):
        assert state_word(seen) == word
        assert ended_words(seen) == words
    assert f" {word} " in command()
    (listed,) = json.loads(command("--json"))
    assert listed["word"] == word
    assert listed["state"] == ("failed" if word in ("refused", "killed") else word)
    assert listed["ended_by"] == reason
    compared = CliRunner().invoke(cli, ["compare", "one", "one"]).output
    assert f"{words}  " in next(line for line in compared.splitlines() if "state" in line) + "  "


def test_the_page_on_runs_tells_every_state_and_word_of_the_list_for_scripts() -> None:
    page = (Path(__file__).parents[3] / "docs" / "runs.md").read_text()
    table, scripts = re.split(r"\*\*For scripts\.\*\*", page.partition("## What the list shows")[2])
    lives, ended = scripts.partition("\n\n")[0].split("while it lives")
    for state in get_args(State):
        assert f"`{state}`" in (lives if state in LIVE else ended.partition(". ")[0])
    words = re.findall(r"^\| ([a-z, ]+) \|", table, re.MULTILINE)
    assert {word for row in words for word in row.split(", ")} - {"word"} == {
        *get_args(State),
        *("cannot save", "damaged", "paused", REFUSED, KILLED),
    }


def test_a_finished_run_tells_the_speed_of_all_its_steps_and_a_live_one_of_the_last() -> None:
    run = create_run(Plan(), "one")
    log = EventWriter(run.attempt_path(run.new_attempt()))
    for record in (step(1, 10.0, 60.0), step(11, 400.0, 1.0), step(41, 100.0, 0.5)):
        log.write(record)
    log.close()
    ended(run, "stopped")
    # 10 steps of 1 s at 400 a second and 30 of 0.5 s at 100; the first step compiled.
    average = pytest.approx((10 * 400 + 15 * 100) / 25)
    snapshot = Follower(run).poll()
    assert snapshot.units_per_second == average
    assert status(run).units_per_second == average
    assert report(run).average_units_per_second == average
    assert "220" in CliRunner().invoke(cli, ["compare", "one", "one"]).output
    assert "Tokens per second: " in CliRunner().invoke(cli, ["report", "one"]).output
    assert snapshot.facts.tokens_per_second == 100.0


def test_the_end_of_a_run_does_not_say_its_reason_twice() -> None:
    assert (
        ended_why("stopped", "stopped at step 3, asked by console")
        == "stopped at step 3, asked by console"
    )
    assert (
        ended_why("out_of_memory", "killed by the kernel") == "out of memory: killed by the kernel"
    )
    assert ended_why("failed", "") == "failed"


def a_run(
    name: str,
    speed: float,
    peak_bytes: int,
    steps: int = 2,
    model: str = "stories",
    **metrics: float,
) -> RunDirectory:
    """A stopped run of these steps with this speed and measured peak. With metrics, it was evaluated."""
    run = create_run(replace(Plan(), {"model.name": model}), name)
    log = EventWriter(run.attempt_path(run.new_attempt()))
    memory = events.Memory(
        step=2, phase="train", allocated_bytes=peak_bytes, peak_bytes=peak_bytes, reserved_bytes=None,
        device_bytes=None, device_total_bytes=None, host_bytes=2**30,
    )  # fmt: skip
    for record in (*(step(n + 1, speed, 1.0) for n in range(steps)), memory):
        log.write(record)
    if metrics:
        log.write(
            events.Evaluation(
                step=steps, loss=2.5, bits_per_byte=None, tokens=0, seconds=1.0, metrics=metrics
            )
        )
    log.close()
    return ended(run, "stopped")


def test_compare_says_which_run_was_fastest_and_which_leanest() -> None:
    a_run("quick", 300.0, 90 * 2**20)
    unnamed = a_run("", 200.0, 60 * 2**20).id
    lines = CliRunner().invoke(cli, ["compare", unnamed, "quick"]).output.splitlines()
    assert lines[0].split() == [unnamed, "quick"]
    assert lines[-1] == (
        f"fastest: quick, x1.50 the slowest; leanest: {unnamed}, 30.0 MiB less than the most"
    )
    namesake = a_run("quick", 300.0, 90 * 2**20).id
    both = CliRunner().invoke(cli, ["compare", unnamed, namesake, namesake]).output
    assert both.splitlines()[0].split() == [unnamed, namesake, namesake]
    a_run("untrained", 300.0, 2**20, steps=0)
    three = CliRunner().invoke(cli, ["compare", unnamed, namesake, "untrained"]).output
    assert three.splitlines()[-1] == lines[-1]
    alike = CliRunner().invoke(cli, ["compare", "quick", "quick"]).output
    assert "fastest" not in alike
    assert "leanest" not in alike


def test_compare_writes_settings_as_a_plan_file_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "/data/" + "texts/" * 20 + "of-one-language"
    for name, changes in (
        ("given", {"optimize.fused_loss": True, "data.source": source}),
        ("default", {}),
    ):
        ended(create_run(replace(Plan(), changes), name), "stopped")

    def rows() -> dict[str, list[str]]:
        lines = CliRunner().invoke(cli, ["compare", "given", "default"]).output.splitlines()
        return {line.split()[0]: line.split()[1:] for line in lines[1:] if line}

    assert rows()["optimize.fused_loss"] == ["true", "false"]
    assert rows()["data.source"] == [source, "python-stdlib"]
    monkeypatch.setattr("memconsole.cli.runs.compare.terminal_width", lambda: 80)
    (shown, _) = rows()["data.source"]
    assert shown.startswith("…")
    assert source.endswith(shown[1:])
    assert len(shown) == 24


def test_compare_names_the_unit_of_each_loss_if_tasks_differ() -> None:
    a_run("text", 300.0, 90 * 2**20, unigram_loss=3.0)
    a_run("items", 200.0, 60 * 2**20, model="efficientids", popularity_loss=6.0)
    a_run("numbers", 100.0, 70 * 2**20, model="lqr", window_loss=0.5, ridge_loss=0.25)

    def rows(*runs: str) -> dict[str, list[str]]:
        lines = CliRunner().invoke(cli, ["compare", *runs]).output.splitlines()
        cells = (re.split(r"  +", line) for line in lines[1:])
        return {label: values for label, *values in cells}

    mixed = rows("text", "items", "numbers")
    units = ["2.5000 nats per token", "2.5000 nats per interaction", "2.5000 masked MSE"]
    assert mixed["best validation loss"] == units
    assert mixed["final training loss"][0] == "2.0000 nats per token"
    assert mixed["unigram model's loss"] == ["3.0000 nats per token", "n/a", "n/a"]
    assert mixed["popularity's loss"][1] == "6.0000 nats per interaction"
    assert mixed["linear map of the window's loss"][2] == "0.5000 masked MSE"
    assert mixed["final loss of a linear map of each family"][2] == "0.2500"
    assert not any("fastest" in label or "leanest" in label for label in mixed)
    alike = rows("text", "text")
    assert alike["best validation loss"] == ["2.5000", "2.5000"]
    assert alike["unigram model's loss"] == ["3.0000", "3.0000"]


@pytest.mark.parametrize("content", ["", "backend = 5", "[train"])
def test_compare_shows_no_settings_of_a_run_whose_plan_is_damaged(content: str) -> None:
    one, other = (create_run(replace(Plan(), {"train.seed": seed})) for seed in (1, 2))
    damaged = create_run(Plan())
    damaged.plan_path.write_text(content)
    done = CliRunner().invoke(cli, ["compare", one.id, damaged.id, other.id])
    assert done.exit_code == 0, done.exception
    row = next(line for line in done.output.splitlines() if line.startswith("train.seed"))
    assert row.split() == ["train.seed", "1", "n/a", "2"]
