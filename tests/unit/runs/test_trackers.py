"""Figures are sent to trackers once, in order, and whatever a tracker does, the run does not notice."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from memconsole.plan.machine.trackers import Kind, check_trackers, wanted
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.runs.act.delete import delete_run
from memconsole.runs.act.trackers import start_trackers
from memconsole.runs.read.follow import Follower
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.records import ExitRecord
from memconsole.runs.record.run_store import create_run
from memconsole.runs.record.states import Verdict
from memconsole.runs.record.trackers import FOLDER, Sent, read_sent
from memconsole_trainer.trackers.forward import AFTER_END_SECONDS, RETRY_SECONDS, forward, told
from memconsole_trainer.trackers.tracker import Figures, Told

Curves = dict[str, list[tuple[int, float]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    made = create_run(replace(Plan(), {"train.wandb": "offline", "train.mlflow": True}), "a name")
    (made.path / FOLDER).mkdir()
    return made


def attempt(run: RunDirectory, first: int, last: int, reason: str) -> None:
    """An attempt that takes steps and evaluates every other one, and ends."""
    number = run.new_attempt()
    log = EventWriter(run.attempt_path(number))
    log.write(
        events.Started(
            attempt=number, backend="torch", versions={}, device_id="cpu", device_name="", device_kind="cpu",
            memory_label="RAM", platform_lines=(), resumed_step=first - 1,
        )
    )  # fmt: skip
    for step in range(first, last + 1):
        log.write(
            events.Step(
                step=step, epoch=1, loss=10.0 / step, learning_rate=1e-3, gradient_norm=None,
                tokens=step, tokens_per_second=5.0, step_seconds=1.0, time_wall=1.8e9 + step,
            )
        )  # fmt: skip
        if step % 2 == 0:
            log.write(
                events.Evaluation(
                    step=step, loss=11.0 / step, bits_per_byte=None, tokens=1, seconds=1.0,
                    metrics={"recall": step / 10}, time_wall=1.8e9 + step,
                )
            )  # fmt: skip
    log.write(events.Epoch(epoch=number, train_loss=1.0, validation_loss=None, minutes=2.0))
    log.close()
    verdict = ExitRecord(verdict=Verdict(reason=reason, evidence=""), time_wall=1.0)
    files.write_struct(run.attempt_path(number) / "exit.json", verdict)


def expected(steps: int, epochs: int) -> Curves:
    every = range(1, steps + 1)
    evens = [step for step in every if step % 2 == 0]
    return {
        "train/loss": [(n, 10.0 / n) for n in every],
        "validation/loss": [(n, 11.0 / n) for n in evens],
        "validation/recall": [(n, n / 10) for n in evens],
        "epoch/minutes": [(n, 2.0) for n in range(1, epochs + 1)],
    }


class Book:
    """A tracker that keeps what it is sent, and fails as `failures` says."""

    def __init__(self, failures: Iterator[Exception | None] = iter(())) -> None:  # noqa: B008
        self.curves: Curves = defaultdict(list)
        self.ended: list[str] = []
        self.opened: list[Told] = []
        self.failures = failures
        self.tracked, self.where = "its-id", "https://somewhere"

    def __call__(self, told: Told) -> Book:
        self.opened.append(told)
        return self

    def send(self, figures: list[Figures]) -> None:
        if (failure := next(self.failures, None)) is not None:
            raise failure
        for found in figures:
            for tag, value in found.values.items():
                self.curves[tag].append((found.step, value))

    def finish(self, state: str) -> None:
        self.ended.append(state)


def agree(found: Curves, wanted: Curves) -> None:
    for tag, points in wanted.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        values = [value for _, value in found[tag]]
        assert values == pytest.approx([value for _, value in points]), tag


def test_the_command_that_sends_figures_can_be_pasted_whatever_the_folder_is_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", MagicMock())
    from memconsole_trainer.trackers.wandb_tracker import WandbTracker

    folder = tmp_path / "it's two words"
    (folder / "wandb/offline-run-1-its-id").mkdir(parents=True)
    told = Told("its-id", "a name", folder, {}, (), "", offline=True, tracked="")
    echo = f'set -- {WandbTracker(told).where}; echo $#; echo "$5"'
    said = subprocess.run(["bash", "-c", echo], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["5", f"{folder}/wandb/offline-run-1-its-id"]


def test_each_figure_is_sent_once_though_attempts_repeat_steps(run: RunDirectory) -> None:
    attempt(run, 1, 5, "killed")
    first = Book()
    forward(run, "mlflow", first)
    assert first.ended == ["killed"]
    agree(first.curves, expected(5, 1))
    attempt(run, 3, 8, "finished")
    second = Book()
    forward(run, "mlflow", second)
    assert [one.tracked for one in second.opened] == ["its-id"], "it continues the same run"
    both = {tag: first.curves[tag] + second.curves[tag] for tag in second.curves}
    agree(both, expected(8, 2))
    third = Book()
    forward(run, "mlflow", third)
    assert (third.opened, third.ended) == ([], []), "nothing new, so nothing is opened"


@pytest.mark.parametrize("ends_between", [True, False])
def test_an_attempt_that_begins_again_is_another_run_in_the_tracker(
    run: RunDirectory, ends_between: bool
) -> None:
    attempt(run, 1, 5, "killed")
    book = Book()
    if ends_between:
        forward(run, "mlflow", book)
    attempt(run, 1, 3, "killed")
    attempt(run, 3, 8, "finished")
    forward(run, "mlflow", book)
    first, second = book.opened
    assert [first.id, second.id] == [run.id, f"{run.id}-2"]
    assert [first.tracked, second.tracked] == ["", ""]
    assert book.ended == ["killed", "finished"]
    losses = [step for step, _ in book.curves["train/loss"]]
    assert losses == [*range(1, 6), *range(1, 9)]


def test_a_tracker_that_fails_as_a_run_begins_again_makes_one_run_of_it(run: RunDirectory) -> None:
    attempt(run, 1, 5, "killed")
    attempt(run, 1, 8, "finished")
    book = Book(iter([None, ConnectionError("down"), ConnectionError("down")]))
    forward(run, "mlflow", book, lambda seconds: None)
    assert {told.id for told in book.opened} == {run.id, f"{run.id}-2"}
    assert [step for step, _ in book.curves["train/loss"]] == [*range(1, 6), *range(1, 9)]


def test_a_tracker_that_fails_is_tried_again_and_the_run_says_why(run: RunDirectory) -> None:
    attempt(run, 1, 4, "finished")
    seen: list[tuple[str, ...]] = []
    book = Book(iter([ConnectionError("no route\nto host"), OSError(28, "No space left")]))
    forward(run, "wandb", book, lambda seconds: seen.append(Follower(run).poll().warnings))
    agree(book.curves, expected(4, 1))
    assert "W&B: no route⏎to host" in seen[0][0] or "no route to host" in seen[0][0]
    assert "the run goes on, and its figures are sent later" in seen[0][0]
    assert Follower(run).poll().warnings == ()
    assert Follower(run).poll().tracked == (("W&B", "https://somewhere"),)


def test_it_gives_up_some_time_after_the_end_and_a_later_process_sends_the_rest(
    run: RunDirectory,
) -> None:
    attempt(run, 1, 4, "finished")
    slept: list[float] = []
    down = Book(iter(lambda: ConnectionError("down"), None))
    forward(run, "mlflow", down, slept.append)
    assert sum(slept) == pytest.approx(AFTER_END_SECONDS, abs=2 * RETRY_SECONDS)
    assert read_sent(run.path, "mlflow").problem == "down"
    up = Book()
    forward(run, "mlflow", up)
    agree(up.curves, expected(4, 1))


def test_a_full_disk_of_the_run_stops_no_figure(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(run, 1, 4, "finished")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_atomic", full)
    book = Book()
    forward(run, "mlflow", book)
    agree(book.curves, expected(4, 1))


def test_a_deleted_run_ends_its_trackers(run: RunDirectory) -> None:
    attempt(run, 1, 4, "finished")
    book = Book(iter(lambda: ConnectionError("down"), None))

    def deleted(seconds: float) -> None:
        delete_run(run)

    forward(run, "mlflow", book, deleted)
    assert not run.path.exists()


def test_settings_are_told_without_secrets(run: RunDirectory) -> None:
    token = "hf_" + "a" * 34
    hidden = create_run(replace(Plan(), {"data.source": f"https://x/{token}"}))
    found = told(hidden, Sent())
    assert found.settings["train.batch_size"] == 16
    assert token not in json.dumps(found.settings)


def test_a_missing_package_is_one_sentence_before_anything_starts() -> None:
    for key, value, kind in (("train.wandb", "offline", "wandb"), ("train.mlflow", True, "mlflow")):
        plan = replace(Plan(), {key: value})
        assert wanted(plan) == (kind,)
        with pytest.raises(PlanError, match=f"{key} = .*the package {kind} is not installed") as e:
            check_trackers(plan, lambda package: False)
        assert f"pip install '.[{kind}]' in its checkout" in str(e.value)
        check_trackers(plan, lambda package: True)
    check_trackers(Plan(), lambda package: False)


def sent_by_a_process(run: RunDirectory, kind: Kind, wait: Callable[[], bool]) -> None:
    start_trackers(run)
    end = time.monotonic() + 120
    while not wait():
        assert time.monotonic() < end, (run.path / FOLDER / f"{kind}.log").read_text()
        time.sleep(0.2)


def test_mlflow_has_the_figures_of_both_attempts_in_one_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    from memconsole_trainer.trackers.mlflow_tracker import MlflowTracker

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    attempt(run, 1, 5, "killed")
    forward(run, "mlflow", MlflowTracker)
    attempt(run, 3, 8, "finished")
    forward(run, "mlflow", MlflowTracker)
    sent = read_sent(run.path, "mlflow")
    assert not sent.problem
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=sent.where)
    (experiment,) = [e for e in client.search_experiments() if e.name == "memconsole"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_id, found.info.run_name) == (sent.tracked, "a name")
    assert found.info.status == "FINISHED"
    assert found.data.params["train.batch_size"] == "16"
    wanted = expected(8, 2)
    history = {tag: client.get_metric_history(sent.tracked, tag) for tag in wanted}
    agree({tag: [(m.step, m.value) for m in one] for tag, one in history.items()}, wanted)


def records(path: Path) -> Iterator[bytes]:
    """The records of a W&B file: a header of 7 bytes, then LevelDB's log format (blocks of 32 KiB;
    checksum, length and kind before each piece)."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def logged(folder: Path) -> Curves:
    """The history of an offline run, with the number of the epoch for figures of an epoch."""
    from wandb.proto import wandb_internal_pb2

    found: Curves = defaultdict(list)
    (path,) = folder.glob("*.wandb")
    for content in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") != "history":
            continue
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for tag, value in items.items():
            step = items["epoch"] if tag.startswith("epoch/") else items["_step"]
            found[tag].append((step, value))
    return found


def test_wandb_has_the_figures_of_both_attempts_under_one_id(run: RunDirectory) -> None:
    pytest.importorskip("wandb")
    attempt(run, 1, 5, "killed")
    sent_by_a_process(
        run, "wandb", lambda: read_sent(run.path, "wandb").last.get("train/loss") == 5
    )
    attempt(run, 3, 8, "finished")
    sent_by_a_process(
        run, "wandb", lambda: read_sent(run.path, "wandb").last.get("train/loss") == 8
    )
    sent = read_sent(run.path, "wandb")
    assert sent.tracked == run.id
    assert sent.where.endswith(f"wandb/offline-run-*-{run.id}")
    folders = sorted((run.path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(folder.name.endswith(run.id) for folder in folders)
    first, second = map(logged, folders)
    agree({tag: first[tag] + second[tag] for tag in second}, expected(8, 2))
