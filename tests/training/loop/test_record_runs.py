"""Whole runs on records: only answers count, held-out records are answered, and a resume is exact."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.plan.training.resuming import changed
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.data.make.equipment import record
from memconsole_trainer.data.text.tokens.tokenizer import train
from memconsole_trainer.loop import training
from memconsole_trainer.sample import main as sample
from memconsole_trainer.tasks.language import LanguageData
from tests.training.harness.runs import TINY, attempt, final, state_hashes, told

SETTINGS: dict[str, Any] = {
    **TINY,
    "data.template": "equipment",
    "data.loss_on": "answers",
    "data.lowercase": True,
    "data.code_field": "codes",
    "data.isolate_documents": True,
    "data.vocab_size": 512,
    "data.sequence_length": 192,
    "train.epochs": 1,
    "train.max_steps": 6,
    "train.log_every": 1,
    "train.evaluate_every": 3,
    "train.answered_records": 2,
    "train.evaluation_batches": 2,
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "made.jsonl"
    rows = [record(np.random.default_rng(number)) for number in range(120)]
    rows[7]["symptom"] = "rattles " * 200
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def plan(records: Path, backend: str) -> Plan:
    return replace(Plan(), {**SETTINGS, "backend": backend, "data.source": str(records)})


def trained(records: Path, backend: str) -> RunDirectory:
    run = create_run(plan(records, backend))
    assert attempt(run) == 0, final(run)
    return run


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_run_on_records_answers_them_and_a_resumed_one_is_the_same(
    backend: str, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(records, backend)
    (warning,) = [
        w.message for w in told(whole, events.Warning) if "longer than a row" in w.message
    ]
    assert warning.startswith("1 of ")
    found = told(whole, events.Evaluation)
    assert [e.step for e in found] == [3, 6]
    names = ("exact_match", "token_f1", "token_f1_cause", "nearest_token_f1_solution")
    for one in found:
        assert all(0.0 <= one.metrics[name] <= 1.0 for name in names)
        assert one.metrics["nearest_token_f1"] == found[0].metrics["nearest_token_f1"] > 0.2
    assert told(whole, events.Sample)[-1].prompt.endswith("<cause>")

    again = create_run(plan(records, backend))
    assert attempt(again, lambda phase, step: step == 4) == 75
    assert attempt(again) == 0
    assert state_hashes(again) == state_hashes(whole)
    assert [e.metrics for e in told(again, events.Evaluation)] == [e.metrics for e in found]

    capsys.readouterr()
    fields = ["--record=equipment=Bruun 61 dozer", "--record=symptom=lamp is lit"]
    assert asked(whole, [*fields, "--tokens=5"]) == 0
    cause, solution = capsys.readouterr().out.splitlines()
    assert cause.startswith("cause: ")
    assert solution.startswith("solution:")
    assert asked(whole, fields[:1]) == 2
    assert 'has no field "symptom"; give --record symptom=… --record codes=…' in capsys.readouterr().err  # fmt: skip
    assert asked(whole, ["--record=symptoms=x"]) == 2
    assert 'did you mean "symptom"' in capsys.readouterr().err


def test_a_resumed_run_that_answers_other_records_trains_the_same(records: Path) -> None:
    whole = trained(records, "torch")
    other = create_run(plan(records, "torch"))
    assert attempt(other, lambda phase, step: step == 4) == 75
    other.write_plan(changed(other.read_plan(), {"train.answered_records": 5}))
    assert attempt(other) == 0, final(other)
    assert state_hashes(other) == state_hashes(whole)
    first, last = (told(run, events.Evaluation)[-1] for run in (whole, other))
    assert last.loss == first.loss
    assert last.metrics["nearest_token_f1"] != first.metrics["nearest_token_f1"]


def asked(run: RunDirectory, options: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sample", str(run.path), *options])
        return sample()


def test_a_bad_record_ends_the_run_with_its_file_and_line(tmp_path: Path, records: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = records.read_text().splitlines()
    lines[9] = '{"equipment": "a", "symptom": "b"}'
    path.write_text("\n".join(lines))
    run = create_run(plan(path, "torch"))
    assert attempt(run) == 77
    (error,) = told(run, events.Error)
    assert f"{path}: line 10 has no field" in error.message


def test_a_run_warns_of_tags_that_its_tokenizer_splits(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"}]
    chats.write_text((json.dumps({"messages": chat}) + "\n") * 60)
    (tmp_path / "plain").mkdir()
    train(["hi there, hello\n"] * 40, 300).save(tmp_path / "plain" / "tokenizer.json")
    changes = {"data.template": "chatml", "data.code_field": None, "data.lowercase": False}
    own = replace(plan(chats, "torch"), {**changes, "train.max_steps": 1})
    given = replace(own, {"data.tokenizer": str(tmp_path / "plain" / "tokenizer.json")})
    said = []
    for one in (own, given):
        run = create_run(one)
        assert attempt(run) == 0, final(run)
        said.append([w.message for w in told(run, events.Warning) if "no token" in w.message])
    assert said[0] == []
    (words,) = said[1]
    assert words.startswith(
        'data.template = "chatml": <|im_start|> and <|im_end|> are no tokens of data.tokenizer; each '
    )


def test_the_seconds_of_an_evaluation_include_measures_and_answers_and_a_sample_has_its_own(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(name: str, seconds: float) -> None:
        own = getattr(LanguageData, name)

        def slowly(*args: Any) -> Any:
            clock[0] += seconds
            return own(*args)

        monkeypatch.setattr(LanguageData, name, slowly)

    for name, seconds in {"validation": 1, "judged": 2, "answered": 4, "sample": 8}.items():
        slow(name, seconds)
    run = create_run(replace(plan(records, "torch"), {"train.max_steps": 1}))
    assert attempt(run) == 0, final(run)
    assert [one.seconds for one in told(run, events.Evaluation)] == [7.0]
    assert [one.seconds for one in told(run, events.Sample)] == [8.0]
