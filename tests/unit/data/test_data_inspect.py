"""Looking into a dataset from a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from memconsole.cli.data import data
from memconsole.cli.main import cli
from memconsole.plan.plan import Plan, replace
from memconsole_trainer.data.inspect import Inspection, inspect


def test_the_process_prints_json_and_its_exit_code_tells_failures(tmp_path: Path) -> None:
    def look(*arguments: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "memconsole_trainer.data", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, json.loads(done.stdout)

    (tmp_path / "a.txt").write_text("some words")
    code, found = look(str(tmp_path / "a.txt"))
    assert code == 0
    assert found | {"source": ""} == {
        "source": "",
        "kind": "texts",
        "documents": 1,
        "size_bytes": 10,
        "files": "",
        "items": None,
        "columns": [],
        "row_tokens": None,
        "sample": "some words",
        "warning": "",
        "problem": "",
        "lengths": None,
        "lengths_problem": "",
    }
    (tmp_path / "bad.h5").write_bytes(b"no")
    code, found = look(str(tmp_path / "bad.h5"))
    assert code == 77
    assert "bad.h5" in found["error"]


@pytest.mark.parametrize(("kind", "code"), [("unusable", 2), ("texts", 0)])
def test_what_no_run_can_train_on_ends_the_command_with_2(
    kind: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"source": "a.csv", "kind": kind, "columns": ["a int64"]}
    monkeypatch.setattr(data, "inspection", lambda *_, **__: found)
    done = CliRunner().invoke(cli, ["data", "inspect", "a.csv"])
    assert done.exit_code == code
    assert "a int64" in done.output


def test_columns_that_hold_no_text_say_what_they_hold(tmp_path: Path) -> None:
    rows = [
        {"text": "some", "tags": ["a"], "meta": {"x": 1}, "answer": 1, "n": 2},
        {"text": "words", "tags": ["b"], "meta": {"x": 2}, "answer": "yes", "n": 3},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = inspect(replace(Plan(), {"data.source": str(path)}))
    kinds = ("text string", "tags list", "meta object", "answer mixed types", "n int64")
    assert (found.kind, found.columns) == ("texts", kinds)


def test_hdf5_shows_its_datasets_and_why_it_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["states"] = np.zeros((5, 4, 3), dtype=np.float32)
    found = inspect(replace(Plan(), {"data.source": str(path)}))
    assert found.kind == "unusable"
    assert found.columns == ("states 5x4x3 float32",)
    assert "no dataset fits" in found.problem
    with h5py.File(path, "a") as file:
        file["tokens"] = np.arange(12).reshape(3, 4)
    found = inspect(replace(Plan(), {"data.source": str(path)}))
    assert (found.kind, found.documents, found.row_tokens) == ("tokens", 3, 4)
    assert found.sample == "0 1 2 3"


def test_ratings_are_told_from_text_and_a_bad_row_is_named(tmp_path: Path) -> None:
    def look(name: str, content: str) -> Inspection:
        (tmp_path / name).write_text(content)
        return inspect(replace(Plan(), {"data.source": str(tmp_path / name)}))

    found = look("ratings.dat", "1::10::5::100\n1::11::3::101\n2::10::4::99\n")
    assert (found.kind, found.documents, found.problem) == ("ratings", 3, "")
    assert found.sample == "3 interactions of 2 users with 2 items"
    found = look("ratings.csv", "userId,movieId,rating,timestamp\n1,10,4.5,100\n")
    assert (found.kind, found.documents) == ("ratings", 1)
    found = look("ratings.dat", "1::10::5::100\n1::11::3::soon\n")
    assert found.kind == "unusable"
    assert "line 2: the time is neither a number nor an ISO date" in found.problem
    found = look("shop.csv", "customer,product,stars,date\nann,tea,5,2020-01-01\n")
    assert (found.kind, found.documents) == ("ratings", 1)
    assert found.columns == ("customer (user)", "product (item)", "stars", "date (time)")
    found = look("laden.csv", "Kunde,Artikel\n1,2\n")
    assert found.kind == "unusable"
    assert found.problem.endswith("; for ratings set data.user_column and data.item_column")
    named = {"data.user_column": "Kunde", "data.item_column": "Artikel"}
    found = inspect(replace(Plan(), {"data.source": str(tmp_path / "laden.csv"), **named}))
    assert (found.kind, found.columns) == ("ratings", ("Kunde (user)", "Artikel (item)"))
    assert look("reviews.csv", "user_id,item_id,text\n1,2,good\n").kind == "texts"
    assert look("words.dat", "a::b::c::d\n").kind == "texts"
    assert look("table.csv", "text,n\nsome words,1\n").kind == "texts"
