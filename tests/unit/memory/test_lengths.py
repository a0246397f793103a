"""Token lengths of documents: measured as training tokenizes, remembered, and priced."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from memconsole.cli.main import cli
from memconsole.devices.budget import budget
from memconsole.memory.answers.lengths import keep_lengths, known_lengths, priced_lengths
from memconsole.memory.estimate import table_of
from memconsole.plan import plan as plans
from memconsole.plan.data.lengths import Lengths, lengths_key, percentile
from memconsole.plan.plan import Plan
from memconsole_trainer.data.sources.documents import DataError, FileDocuments
from memconsole_trainer.data.sources.opening import open_source
from memconsole_trainer.data.text import lengths as measuring
from memconsole_trainer.data.text.lengths import measure_lengths
from memconsole_trainer.data.text.tokens import tokenizer as tokenizers

TEXTS = [f"document {n}: " + "a few words of it, " * (n % 17) for n in range(60)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "texts"
    found.mkdir()
    for n, text in enumerate(TEXTS):
        (found / f"{n:03}.txt").write_text(text)
    return found


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    tokenizers.train(TEXTS, 300).save(path)
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def measured(plan: Plan) -> Lengths:
    return measure_lengths(plan, open_source(plan, 2**31))


def expected(texts: list[str], tokenizer: Path) -> list[int]:
    """Straight from the tokenizers library, one end-of-text token after each document."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(tokenizer))
    return sorted(len(inner.encode(text).ids) + 1 for text in texts)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[int], share: float
) -> None:
    found = percentile(sorted(values), share)
    assert sum(v <= found for v in values) >= share * len(values)
    assert all(
        sum(v <= other for v in values) < share * len(values) for other in values if other < found
    )


def test_files_and_rows_of_a_table_have_the_lengths_the_tokenizer_says(
    folder: Path, tokenizer: Path, tmp_path: Path
) -> None:
    table = tmp_path / "t.jsonl"
    table.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    wanted = expected(TEXTS, tokenizer)
    for source in (folder, table):
        plan = plans.replace(Plan(), {"data.source": str(source), "data.tokenizer": str(tokenizer)})
        found = measured(plan)
        assert (found.kind, found.documents, found.exact) == ("packed", 60, True)
        assert (found.p50, found.p99, found.longest) == (wanted[29], wanted[59], wanted[59])


def test_the_tags_of_a_template_count_as_training_reads_them(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizers.train(TEXTS, 300, tags=["<|im_start|>", "<|im_end|>"]).save(tokenizer)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "few words"}]}) + "\n")
    plan = plans.replace(
        Plan(),
        {"data.source": str(path), "data.template": "chatml", "data.tokenizer": str(tokenizer)},
    )
    # <|im_start|> user, a line break, few words, <|im_end|>, a line break and <|endoftext|>.
    words = expected(["user\nfew words"], tokenizer)[0]
    line = expected(["\n"], tokenizer)[0] - 1
    assert measured(plan).longest == 1 + words - 1 + 1 + line + 1


def test_of_too_much_text_a_spread_sample_is_measured_and_said_to_be_one(
    folder: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "t.jsonl"
    table.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    monkeypatch.setattr(measuring, "MOST_BYTES", 2000)
    for source in (folder, table):
        plan = plans.replace(Plan(), {"data.source": str(source), "data.tokenizer": str(tokenizer)})
        found = measured(plan)
        assert not found.exact
        assert 10 <= found.documents < 60
        assert found.p50 <= found.p99 <= found.longest <= expected(TEXTS, tokenizer)[-1]


def test_a_long_file_is_measured_in_the_pieces_that_training_reads(
    tmp_path: Path, tokenizer: Path
) -> None:
    file = tmp_path / "one.txt"
    file.write_text("the same few words again\n\n" * 20_000)
    settings = {"data.source": str(file), "data.tokenizer": str(tokenizer)}
    plan = plans.replace(Plan(), settings)
    source = open_source(plan, 2**31)
    assert isinstance(source, FileDocuments)
    pieces = [source.read(n, n + 1)[0] for n in range(source.count or 0)]
    assert len(pieces) > 5
    wanted = expected(pieces, tokenizer)
    found = measured(plan)
    assert (found.documents, found.exact, found.longest) == (len(pieces), True, wanted[-1])
    assert found.p50 == percentile(wanted, 0.5)
    settings = {"data.tokenizer": str(tokenizer), "model.name": "gpt2", "data.source": str(file)}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    shown = run("plan", *words, "--set", "device.name=h100-80gb", "--lengths").output
    row = -(-found.p50 // 8) * 8
    said = (
        f"long enough for half of the documents has {row:,} tokens; this model takes at most 1,024"
    )
    assert said in shown


def test_rows_of_records_are_said_to_be_padded() -> None:
    shown = run("plan", "--preset", "gearhead-small").output
    assert "what is left of a row is padded" in shown
    assert "documents are packed" not in shown


def test_rows_of_tokens_are_as_wide_as_the_file_says(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["tokens"] = np.arange(120).reshape(3, 40)
    found = measured(plans.replace(Plan(), {"data.source": str(tmp_path / "x.h5")}))
    assert (found.kind, found.documents) == ("rows", 3)
    assert (found.p50, found.p99, found.longest) == (40, 40, 40)


def test_an_empty_table_is_one_line(tmp_path: Path, tokenizer: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("text", shape=(0,), dtype=h5py.string_dtype())
    plan = plans.replace(
        Plan(),
        {"data.source": str(tmp_path / "x.h5"), "data.tokenizer": str(tokenizer)},
    )
    with pytest.raises(DataError, match="no documents"):
        measured(plan)


def test_a_measurement_is_remembered_until_the_data_or_its_tokenizer_changes(
    folder: Path, tokenizer: Path
) -> None:
    plan = plans.replace(Plan(), {"data.source": str(folder / "001.txt")})
    found = Lengths(kind="packed", documents=1, exact=True, p50=5, p99=6, longest=7, tokenizer="")
    assert known_lengths(plan) is None
    keep_lengths(plan, found)
    assert known_lengths(plan) == found
    longer_rows = plans.replace(plan, {"data.sequence_length": 512, "train.batch_size": 1})
    assert known_lengths(longer_rows) == found
    assert known_lengths(plans.replace(plan, {"data.tokenizer": str(tokenizer)})) is None
    assert known_lengths(plans.replace(plan, {"data.vocab_size": 300})) is None
    assert known_lengths(plans.replace(plan, {"data.characters": True})) is None
    assert known_lengths(plans.replace(plan, {"data.max_examples": 3})) is None
    key = lengths_key(plan)
    (folder / "001.txt").write_text("changed")
    os.utime(folder / "001.txt", ns=(1, 1))
    assert lengths_key(plan) != key
    assert known_lengths(plan) is None


def test_a_damaged_measurement_is_none(folder: Path, tmp_path: Path) -> None:
    plan = plans.replace(Plan(), {"data.source": str(folder)})
    where = tmp_path / "cache" / "memconsole" / "lengths"
    where.mkdir(parents=True)
    (where / f"{lengths_key(plan)}.json").write_text('{"kind": "packed"')
    assert known_lengths(plan) is None


def test_documents_are_priced_as_rows_that_hold_them() -> None:
    plan = plans.replace(Plan(), {"model.name": "gpt2", "device.name": "rtx-3060-12gb"})
    device = budget(plan, None)
    lengths = Lengths(
        kind="packed", documents=9, exact=True, p50=101, p99=1024, longest=1025, tokenizer="t"
    )
    prices = priced_lengths(plan, device, lengths)
    assert [p.sequence_length for p in prices] == [104, 1024, 1032]
    for price in prices[:2]:
        changed = plans.replace(plan, {"data.sequence_length": price.sequence_length})
        assert price.table == table_of(changed, device)
    assert prices[2].table is None, "gpt2 has 1,024 positions"


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_plan_and_fit_show_the_three_prices_once_they_are_known(
    command: str, folder: Path, tokenizer: Path
) -> None:
    settings = ("--set", f"data.source={folder}", "--set", f"data.tokenizer={tokenizer}",
                "--set", "device.name=rtx-3060-12gb")  # fmt: skip
    if command == "fit":  # found in a moment where little is free
        for key in ("lora_rank", "optimizer", "precision", "activation_offload"):
            settings += ("--keep", key)
    unknown = run(command, *settings)
    assert "every row is 128 tokens" in unknown.output
    assert "--lengths measures them" in unknown.output
    assert json.loads(run(command, *settings, "--json").stdout)["rows"]["lengths"] is None
    inspected = run("data", "inspect", str(folder), "--set", f"data.tokenizer={tokenizer}")
    assert "tokens per document" in inspected.output
    rows: dict[str, Any] = json.loads(run(command, *settings, "--json").stdout)["rows"]
    wanted = expected(TEXTS, tokenizer)
    assert rows["lengths"]["p50"] == wanted[29]
    assert [p["tokens"] for p in rows["prices"]] == [wanted[29], wanted[59], wanted[59]]
    assert all(p["device_bytes"] > 0 for p in rows["prices"])
    text = run(command, *settings).output
    assert "all 60 documents" in text
    assert text.count("a row long enough for ") == 3


@pytest.mark.parametrize(("preset", "positions"), [("lqr", "steps"), ("efficientids", "items")])
def test_other_tasks_name_what_their_rows_hold_and_have_nothing_to_measure(
    preset: str, positions: str
) -> None:
    shown = run("plan", "--preset", preset)
    assert f"every row is 32 {positions}, so that" in shown.output
    refused = run("plan", "--preset", preset, "--lengths")
    assert "only documents of text have lengths to measure" in str(refused.exception)


def test_lengths_can_be_measured_by_plan_itself(folder: Path) -> None:
    done = run("plan", "--set", f"data.source={folder}", "--set", "device.name=rtx-3060-12gb",
               "--lengths", "--json")  # fmt: skip
    found = json.loads(done.stdout)["rows"]["lengths"]
    assert found["documents"] == 60
    assert "trained on this data" in found["tokenizer"]
    gone = run(
        "plan", "--set", f"data.source={folder}", "--set", "data.tokenizer=/none.json", "--lengths"
    )
    assert type(gone.exception).__name__ == "PlanError"
