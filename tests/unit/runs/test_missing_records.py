"""Damaged event logs are told wherever a run is shown, and the figures they may change are marked."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.cli.runs.progress import ProgressLines
from memconsole.runs.read.follow import Follower, status
from memconsole.runs.read.report.receipt import write_receipt
from memconsole.runs.read.report.report import report
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.run_store import find_run, runs_root

RUN = Path(__file__).parents[2] / "data" / "golden_run"
"""A finished run of 14 steps with evaluations after steps 7, 10 and 14, the best one last."""
BEST = 6.541998726981027
WORDS = "1 record is missing or damaged in the event log"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    id = json.loads((RUN / "run.json").read_bytes())["id"]
    runs_root().mkdir(parents=True, exist_ok=True)
    shutil.copytree(RUN, runs_root() / id)
    (runs_root() / id).chmod(0o700)
    (runs_root() / id / "state.json").unlink()
    return find_run(id)


def change(run: RunDirectory, change: Callable[[list[bytes]], None]) -> None:
    """Change the lines of the run's event log."""
    (log,) = run.attempt_path(1).glob("events-*.log")
    lines = log.read_bytes().splitlines(keepends=True)
    change(lines)
    log.write_bytes(b"".join(lines))


def flip_the_best(lines: list[bytes]) -> None:
    """Flip one bit of the best validation loss."""
    number = next(
        i for i, line in enumerate(lines) if b'"evaluation"' in line and b"6.5419" in line
    )
    lines[number] = lines[number].replace(b"6.5419", b"6.1419")


def cut_the_end(lines: list[bytes]) -> None:
    """As if the trainer had been killed before its last records."""
    del lines[next(i for i, line in enumerate(lines) if b'"epoch":2,"train_loss"' in line) :]


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(cli, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_flipped_bit_is_told_by_every_command_and_the_best_loss_stays(run: RunDirectory) -> None:
    for arguments in (("report", run.id), ("runs",), ("compare", run.id, run.id)):
        assert "missing" not in printed(*arguments)
        assert "?" not in printed(*arguments)
    change(run, flip_the_best)
    for arguments in (("report", run.id), ("runs",), ("compare", run.id, run.id)):
        assert WORDS in printed(*arguments)
    found = json.loads(printed("report", run.id, "--json"))
    assert found["missing_records"] == 1
    assert found["best_validation_loss"] == BEST  # the trainer told it again at the end
    assert "evaluations" in found["uncertain"]
    assert "best_validation_loss" not in found["uncertain"]
    assert [one["missing_records"] for one in json.loads(printed("runs", "--json"))] == [1]
    assert re.search(r"Best validation loss: +6\.5420 nats\n", printed("report", run.id))
    assert re.search(r"Final validation loss: +6\.5420 nats\n", printed("report", run.id))
    assert re.search(r"allocated .* [\d.]+ MiB \? ", printed("report", run.id))


def test_figures_of_a_run_that_told_no_end_are_marked(run: RunDirectory) -> None:
    change(run, cut_the_end)
    assert report(run).uncertain == ()
    change(run, flip_the_best)
    found = report(run)
    assert found.missing_records == 1
    assert {"best_validation_loss", "final_train_loss", "evaluations"} <= set(found.uncertain)
    text = printed("report", run.id)
    assert re.search(r"Best validation loss: +6\.6038 nats at step [\d,]+ \?\n", text)
    assert re.search(r"Peak memory: .* \?\n", text)
    assert re.search(r"best validation loss +6\.6038 \?", printed("compare", run.id))
    told = [line for line in ProgressLines().new(Follower(run).poll()) if WORDS in line]
    assert told == [f"warning: {WORDS}: figures with ? may be wrong"]


def test_a_document_names_only_figures_that_it_has(run: RunDirectory) -> None:
    change(run, cut_the_end)
    change(run, flip_the_best)
    document = json.loads(msgspec.json.encode(report(run)))
    assert document["uncertain"]
    for name in document["uncertain"]:
        found: Any = document
        for key in name.split("."):
            found = found[key]


@pytest.mark.parametrize("place", ["first", "middle", "last", "newline", "gone", "two", "torn"])
def test_every_lost_record_is_counted_once(run: RunDirectory, place: str) -> None:
    def damage(lines: list[bytes]) -> None:
        index = {"first": 0, "last": len(lines) - 1, "torn": len(lines) - 1}.get(place, 20)
        if place == "newline":
            lines[index] = lines[index][:-1] + b"\x0b"  # both records can still be read
        elif place == "gone":
            del lines[index : index + 7]
        elif place == "torn":
            lines[index] = lines[index][:-1] + b"\x0b"
        else:
            lines[index] = lines[index].replace(b'"kind"', b'"kinD"')
        if place == "two":
            lines[index + 2] = lines[index + 2].replace(b'"kind"', b'"kinD"')

    change(run, damage)
    expected = {"gone": 7, "two": 2}.get(place, 1)
    assert report(run).missing_records == expected
    assert Follower(run).poll().missing_records == expected
    assert write_receipt(run).missing_records == expected


def test_a_record_that_is_being_written_is_not_damage(run: RunDirectory) -> None:
    change(run, lambda lines: lines.append(b'{"kind":"ste'))
    for name in ("final.json", "exit.json"):
        (run.attempt_path(1) / name).unlink()
    assert Follower(run).poll().missing_records == 0
    assert report(run).missing_records == 0
    EventWriter(run.attempt_path(run.new_attempt())).write(events.Warning(message="resumed"))
    assert Follower(run).poll().missing_records == 1  # nobody goes on writing it
    assert report(run).missing_records == 1


def test_the_count_is_the_same_for_a_reader_that_goes_on_from_the_saved_state(
    run: RunDirectory,
) -> None:
    (log,) = run.attempt_path(1).glob("events-*.log")
    whole = log.read_bytes().splitlines(keepends=True)
    whole[20] = b"damaged\n"
    log.write_bytes(b"".join(whole[:21]))
    assert Follower(run).save_state()  # before the gap in the numbers can be seen
    log.write_bytes(b"".join(whole))
    assert Follower(run).poll().missing_records == 1
    assert Follower(run).save_state()
    assert status(run).missing_records == 1
    run.state_path.unlink()
    assert status(run).missing_records == 1


def test_no_flipped_bit_of_the_saved_state_changes_what_is_shown(run: RunDirectory) -> None:
    clean = Follower(run)
    assert clean.save_state()
    expected = clean.poll()
    content = run.state_path.read_bytes()
    json.loads(content)
    ignored = 0
    for place in range(0, len(content), 61):
        bit = 1 << (place % 8)
        damaged = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
        run.state_path.write_bytes(damaged)
        found = Follower(run)
        ignored += found.state.step == 0
        assert found.poll() == expected, place
    assert ignored > 0.9 * len(range(0, len(content), 61))


def test_a_saved_state_without_a_checksum_is_gone_on_from(run: RunDirectory) -> None:
    shutil.copy(RUN / "state.json", run.state_path)
    assert b"checksum" not in run.state_path.read_bytes()
    assert Follower(run).state.step == 14
