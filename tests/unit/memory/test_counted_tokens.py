"""Plans take the tokens that a run counted, not a guess from the size of the text."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from memconsole.memory.run_time import run_steps
from memconsole.memory.state.data import training_tokens
from memconsole.plan import catalog
from memconsole.plan.data.counted import counted_tokens, keep_counted
from memconsole.plan.data.paths import anywhere
from memconsole.plan.plan import Plan, replace
from memconsole.user_folders import cache_folder
from memconsole_trainer.data.sources.documents import FileDocuments


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_first_documents_of_files_are_weighed_by_their_own_size(tmp_path: Path) -> None:
    """The trainer cuts long files into several documents and takes the first ones."""
    sizes = (500, 300_000, 40_000, 90_000, 1_000)
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_bytes(b"six by" * (size // 6) + b"." * (size % 6))
    files = [tmp_path / f"{number}.txt" for number in range(len(sizes))]
    whole = replace(Plan(), {"data.source": str(tmp_path), "data.validation_fraction": 0.0})
    for most in range(1, 9):
        read = FileDocuments(files, most).total_bytes or 0
        guess = training_tokens(replace(whole, {"data.max_examples": most})) or 0
        expected = (training_tokens(whole) or 0) * read / sum(sizes)
        assert guess == pytest.approx(expected, rel=0.02, abs=256), most


def test_a_count_is_used_for_the_same_data_alone(tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("words " * 40_000)
    plan = replace(Plan(), {"data.source": str(text), "train.epochs": 3})
    guess = training_tokens(plan)
    keep_counted(plan, 163_630)
    assert counted_tokens(plan) == 163_630
    assert training_tokens(plan) == 163_630 // 128 * 128 != guess
    assert run_steps(plan, catalog.model(plan)) == 3 * 80
    half = replace(plan, {"data.stride": 64})
    assert training_tokens(half) == 163_630 // 64 * 128
    other = replace(plan, {"data.validation_fraction": 0.5})
    assert counted_tokens(other) is None
    for file in (cache_folder() / "counted").iterdir():
        file.write_text("{")
    assert counted_tokens(replace(plan, {"data.shuffle_buffer": 77})) is None


@pytest.mark.parametrize("name", ["words.txt", "words.jsonl", "words.csv", "words.jsonl.gz"])
def test_the_first_records_of_a_file_are_a_share_of_it(tmp_path: Path, name: str) -> None:
    """A limit of the documents leaves the length of a run known, for each kind of file."""
    lines = [f"word {'of many ' * 40}{n}" for n in range(4_000)]
    text = "".join(f'{{"text": "{line}"}}\n' for line in lines)
    if name == "words.csv":
        text = "text\n" + "\n".join(lines) + "\n"
    if name == "words.txt":
        text = "\n".join(lines) + "\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    whole = replace(Plan(), {"data.source": str(path)})
    tokens = training_tokens(whole)
    assert tokens is not None
    few = training_tokens(replace(whole, {"data.max_examples": 1_000}))
    all_of_them = training_tokens(replace(whole, {"data.max_examples": 1_000_000}))
    assert all_of_them == tokens
    assert few is not None
    if name in ("words.jsonl", "words.csv"):
        assert few == pytest.approx(tokens / 4, rel=0.02)


def test_a_run_counts_for_a_relative_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.txt").write_text("words " * 40_000)
    monkeypatch.chdir(tmp_path)
    plan = replace(Plan(), {"data.source": "words.txt"})
    keep_counted(anywhere(plan), 163_630)
    assert counted_tokens(plan) == 163_630
