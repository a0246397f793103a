"""Runs whose files are damaged, no files or planted: they are listed as damaged, and nothing waits."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import memconsole
from memconsole.calibration import Receipts
from memconsole.cli.main import cli
from memconsole.cli.runs import logs
from memconsole.cli.runs.logs import CHUNK, LONGEST, texts
from memconsole.memory.answers.lengths import keep_lengths
from memconsole.memory.tracers.store import ExactStore, StoredAnswer
from memconsole.plan.data.lengths import Lengths
from memconsole.plan.plan import Plan
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.liveness import Liveness
from memconsole.runs.read.report.report import report
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import (
    create_run,
    find_run,
    list_runs,
    make_runs_root,
    runs_root,
)
from memconsole.tui.run.predictions import kept_estimate

Put = Callable[[Path], Path]
GOLDEN = Path(__file__).parents[2] / "data/golden_run"
FILES = tuple(str(p.relative_to(GOLDEN)) for p in sorted(GOLDEN.rglob("*")) if p.is_file())
LENGTHS = Lengths(
    kind="packed", documents=1, exact=True, p50=1, p99=1, longest=1, tokenizer="a test's"
)
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"


@pytest.fixture
def run() -> RunDirectory:
    id = json.loads((GOLDEN / "run.json").read_bytes())["id"]
    path = make_runs_root() / id
    shutil.copytree(GOLDEN, path)
    path.chmod(0o700)
    return find_run(id)


def looked_at(run: RunDirectory) -> None:
    """Everything that reads a run."""
    follower = Follower(run)
    follower.poll()
    follower.status()
    report(run)
    kept_estimate(run)
    Receipts().refresh()


@pytest.mark.parametrize("file", FILES)
def test_a_run_with_something_else_in_place_of_a_file_is_still_read(
    file: str, no_file: Put, run: RunDirectory
) -> None:
    no_file(run.path / file)
    looked_at(run)


def mutated(document: Any, chance: random.Random) -> Any:
    """`document` with one of its values changed or dropped."""
    inner = document
    while True:
        places = list(inner) if isinstance(inner, dict) else range(min(len(inner), 4))
        place = chance.choice(list(places))
        below = inner[place]
        if isinstance(below, dict | list) and below and chance.random() < 0.9:
            inner = below
            continue
        if isinstance(inner, dict) and chance.random() < 0.3:
            del inner[place]
        elif isinstance(below, int | float):
            inner[place] = chance.choice((0, -1, 2**31, 2**62, 1e300, -1e300, None))
        else:
            inner[place] = chance.choice((None, [], {}, "", 0, [1], "\x1b[2J\ud83d"))
        return document


def test_records_with_impossible_values_never_stop_a_reader(run: RunDirectory) -> None:
    chance = random.Random(26)
    for file in (f for f in FILES if f.endswith(".json")):
        whole = (run.path / file).read_text()
        for _ in range(24 if "state" in file else 6):
            changed = json.dumps(mutated(json.loads(whole), chance))
            (run.path / file).write_text(changed)
            looked_at(run)
        (run.path / file).write_text(whole)


@pytest.mark.parametrize("file", ["run.json", "plan.toml"])
def test_a_damaged_run_is_listed_as_damaged_between_the_others(
    file: str, no_file: Put, run: RunDirectory
) -> None:
    create_run(Plan(), "another")
    no_file(run.path / file)
    listed = json.loads(CliRunner().invoke(cli, ["runs", "--json"]).output)
    damaged = {one["id"]: one["damaged"] for one in listed}
    assert len(damaged) == 2
    assert file in damaged.pop(run.id)
    assert set(damaged.values()) == {""}
    printed = CliRunner().invoke(cli, ["runs"]).output
    assert "another" in printed
    assert f"\ndamaged:\n  {run.id}: " in printed


@pytest.mark.parametrize(
    ("text", "version", "word"),
    [
        ("[train]\nwarp_speed = 9\n", "99.0", "finished"),
        ("[train]\nwarp_speed = 9\n", memconsole.__version__, "damaged"),
        ("[train]\nwarp_sp", "99.0", "damaged"),
    ],
)
def test_a_plan_of_another_version_is_not_damaged_and_the_version_is_named(
    run: RunDirectory, text: str, version: str, word: str
) -> None:
    record = run.record()
    assert record is not None
    files.write_struct(run.record_path, msgspec.structs.replace(record, memconsole=version))
    run.plan_path.write_text(text)
    (listed,) = json.loads(CliRunner().invoke(cli, ["runs", "--json"]).output)
    assert (listed["word"], listed["model"]) == (word, "?")
    told = json.loads(CliRunner().invoke(cli, ["report", run.id, "--json"]).output)
    assert told["plan"] == {}
    assert "the run's plan cannot be read: " in told["plan_problem"]
    written = f"written by memconsole 99.0; this is {memconsole.__version__}"
    printed = CliRunner().invoke(cli, ["runs"]).output
    if word == "finished":
        assert listed["other_version"] == told["plan_problem"]
        assert (
            f"\nof another version:\n  {run.id}: the run's plan cannot be read: {written}"
            in printed
        )
        assert '"train.warp_speed"' in printed
        assert any(written in line for line in Follower(run).poll().warnings)
    else:
        assert listed["damaged"] == told["plan_problem"]
        assert "written by" not in printed


def test_looking_at_runs_makes_nothing(tmp_path: Path) -> None:
    assert list_runs() == []
    assert CliRunner().invoke(cli, ["runs"]).output.startswith("no runs yet")
    Receipts().refresh()
    assert os.listdir(tmp_path) == []
    assert not runs_root().exists()


def test_nobody_else_can_write_where_the_umask_would_let_everyone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create_run(Plan(), "mine")
        keep_lengths(Plan(), LENGTHS)
        ExactStore(tmp_path / "cache/memconsole/exact", "print").write(StoredAnswer(key="one"))
    finally:
        os.umask(before)
    made = list(tmp_path.rglob("*"))
    assert {p.name for p in made} >= {"run.json", "lengths", "exact"}
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_secret_typed_as_a_name_is_kept_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    run = create_run(Plan(), f"first {TOKEN} try")
    assert run.name == "first [redacted] try"
    assert create_run(Plan(), "0123456789abcdef0123").name == "[redacted]"
    for one in list_runs():
        for path in (p for p in one.path.rglob("*") if p.is_file()):
            assert TOKEN not in path.read_text()
            assert "0123456789abcdef" not in path.read_text()


def test_a_line_without_end_is_printed_in_pieces_and_whole() -> None:
    line = "x" * (3 * LONGEST) + "ü\n" + "short\nlast ü"
    pieces = list(texts(io.BytesIO(line.encode()), lambda: False, raw=False))
    assert "".join(pieces) == line
    assert max(map(len, pieces)) <= LONGEST + CHUNK
    bytes_read = io.BytesIO(b"a\xff\n" + "ü".encode()[:1])
    assert list(texts(bytes_read, lambda: False, raw=False)) == [
        "a\N{REPLACEMENT CHARACTER}\n",
        "\N{REPLACEMENT CHARACTER}",
    ]


def test_the_dropped_head_of_a_long_log_is_told_and_not_printed(run: RunDirectory) -> None:
    log = run.attempt_path(1) / "out.log"
    with open(log, "wb") as file:
        file.seek(64 << 20)
        file.write(b"step 2\n")
    done = CliRunner().invoke(cli, ["logs", run.id])
    assert done.output == "[64.0 MiB of earlier output were not kept]\nstep 2\n"


def test_a_followed_log_goes_on_with_the_next_attempt(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.attempt_path(1) / "out.log").write_text("one\n")
    asked = 0

    def lives(_: RunDirectory) -> Liveness:
        """The run halves its batch when it was asked twice, and ends later."""
        nonlocal asked
        asked += 1
        if asked == 2:
            run.new_attempt()
        if asked == 4:
            (run.attempt_path(2) / "out.log").write_text("two\n")
        return Liveness("running" if asked < 6 else "finished", run.newest_attempt())

    monkeypatch.setattr(logs, "liveness", lives)
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.0)
    assert CliRunner().invoke(cli, ["logs", run.id, "-f"]).output == "one\ntwo\n"
    asked = 10
    assert CliRunner().invoke(cli, ["logs", run.id, "-f", "--attempt", "1"]).output == "one\n"


def test_a_log_that_is_no_file_is_named(run: RunDirectory) -> None:
    log = run.attempt_path(1) / "out.log"
    log.unlink()
    os.mkfifo(log)
    done = CliRunner().invoke(cli, ["logs", run.id])
    assert str(done.exception) == f"{run.id}: attempt 1: out.log is a named pipe, not a file"
