"""The tokenizer that a run keeps: it cuts a text always alike, and a damaged file is made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memconsole.plan.models.sizing import size
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.data.sources.documents import Documents, FileDocuments, StreamDocuments
from memconsole_trainer.data.sources.opening import open_source
from memconsole_trainer.data.sources.split import Last, Split
from memconsole_trainer.data.text import run_tokenizer
from memconsole_trainer.data.text.opened import alone
from memconsole_trainer.data.text.run_tokenizer import make_tokenizer
from memconsole_trainer.data.text.tokens import tokenizer as tokenizers

TEXTS = ["the quick brown fox jumps over the lazy dog. " * 20, "def f(x):\n    return x + 1\n" * 30]
TRAINED = tokenizers.train(TEXTS, 300)


def kept(
    folder: Path, known: str = "", given: Path | None = None
) -> tuple[tokenizers.Tokenizer, list[str]]:
    """The tokenizer of a run whose files are in `folder`, and the warnings."""
    for number in range(20):
        (folder / f"{number:02d}.txt").write_text(f"document {number} of words and numbers\n" * 9)
    source = FileDocuments(sorted(folder.glob("*.txt")))
    plan = replace(Plan(), {"data.tokenizer": str(given)} if given else {})
    told: list[str] = []
    found = make_tokenizer(
        plan,
        size(200_000, 300, 64),
        alone(plan, source, Split(source.count, 0.1)),
        folder / "tokenizer.json",
        None,
        known,
        told.append,
    )
    assert found is not None
    return found, told


def sampling(path: Path, model: dict[str, Any]) -> Path:
    document = json.loads(TRAINED._inner.to_str())
    document["model"] |= model
    path.write_text(json.dumps(document))
    return path


def test_bpe_dropout_is_switched_off_and_told(tmp_path: Path) -> None:
    found, told = kept(tmp_path, given=sampling(tmp_path / "given.json", {"dropout": 0.5}))
    (warning,) = told
    assert "dropout 0.5" in warning
    cut = [found.encode(TEXTS) for _ in range(5)]
    assert all(np.array_equal(tokens, TRAINED.encode(TEXTS)) for tokens in cut)
    again, told = kept(tmp_path, known=tokenizers.file_fingerprint(tmp_path / "tokenizer.json"))
    assert again.fingerprint == found.fingerprint == TRAINED.fingerprint
    assert told == []


def test_sampling_of_a_unigram_model_is_switched_off(tmp_path: Path) -> None:
    import tokenizers as library
    from tokenizers import models

    inner = library.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("aa", -1.1)], 0, False))
    inner.model.alpha, inner.model.nbest_size = 0.1, 8
    found = tokenizers.Tokenizer(inner)
    assert found.sampled == "alpha 0.1"
    assert len({tuple(found.encode(["a" * 30])) for _ in range(20)}) == 1


def test_rows_without_text_do_not_count_as_examples(tmp_path: Path) -> None:
    texts = [None, "", "one", None, "one two", "three"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"data.source": str(path), "data.tokenizer_examples": 2, "data.characters": True}
    plan = replace(Plan(), settings)
    opened = alone(plan, open_source(plan, 300), Split(6, 0.0))
    found = make_tokenizer(plan, size(200_000, 300, 64), opened, tmp_path / "tokenizer.json", None)
    assert found is not None
    assert set(found.inner.get_vocab()) == {"<|endoftext|>", "<unk>", *"one tw"}


@pytest.mark.parametrize("damage", ["not JSON", "another token", "deleted"])
def test_a_damaged_file_is_made_again_from_where_it_came_from(damage: str, tmp_path: Path) -> None:
    first, _ = kept(tmp_path)
    saved = tmp_path / "tokenizer.json"
    intact, known = saved.read_bytes(), tokenizers.file_fingerprint(saved)
    assert known == first.fingerprint
    place = intact.index(b"{") if damage == "not JSON" else intact.index(b'"k"') + 1
    saved.write_bytes(intact[:place] + bytes([intact[place] ^ 4]) + intact[place + 1 :])
    if damage == "deleted":
        saved.unlink()
    again, told = kept(tmp_path, known)
    assert again.fingerprint == known
    assert saved.read_bytes() == intact
    assert [str(saved) in line and "damaged" in line for line in told] == [True] * len(told)
    assert len(told) == (damage != "deleted")


def test_a_damaged_file_stays_if_what_is_made_again_is_another(tmp_path: Path) -> None:
    kept(tmp_path)
    saved = tmp_path / "tokenizer.json"
    known = tokenizers.file_fingerprint(saved)
    saved.write_text("{")
    found, _ = kept(tmp_path, known, given=sampling(tmp_path / "given.json", {}))
    assert found.fingerprint != known
    assert saved.read_text() == "{"


def test_a_given_file_that_is_damaged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "given.json").write_text("{")
    with pytest.raises(PlanError, match="not a tokenizer"):
        kept(tmp_path, given=tmp_path / "given.json")


COUNT, FIRST = 60, 0x4E00
"""Documents of one character each, and the first one's code point."""


def learned(source: Documents, split: Split, examples: int, folder: Path) -> list[int]:
    """The numbers of the documents whose characters a tokenizer learned."""
    plan = replace(Plan(), {"data.characters": True, "data.tokenizer_examples": examples})
    saved, sources = folder / "tokenizer.json", alone(plan, source, split)
    made = make_tokenizer(plan, size(200_000, 300, 64), sources, saved, None)
    saved.unlink()
    assert made is not None
    return sorted(ord(c) - FIRST for c in made.inner.get_vocab() if len(c) == 1)


@pytest.mark.parametrize("split", [Split(COUNT, 0.2), Last(COUNT, 0.2), Split(COUNT, 0.0)])
def test_the_tokenizer_learns_from_all_parts_of_the_train_documents(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(COUNT):
        (tmp_path / f"{number:02d}.txt").write_text(chr(FIRST + number))
    source = FileDocuments(sorted(tmp_path.glob("*.txt")))
    train = split.numbers(COUNT, held=False).tolist()
    assert set(train).isdisjoint(split.numbers(COUNT, held=True).tolist())
    assert learned(source, split, COUNT, tmp_path) == train
    few = learned(source, split, 10, tmp_path)
    assert len(few) == 10
    assert few[0] == train[0]
    assert max(np.diff([*few, COUNT])) <= 2.5 * COUNT / 10
    monkeypatch.setattr(run_tokenizer, "TOKENIZER_BYTES", 5)
    fewer = learned(source, split, 10, tmp_path)
    assert len(fewer) == 5
    assert set(fewer) < set(few)
    assert max(np.diff([*fewer, COUNT])) <= 2.5 * COUNT / 5


def test_the_tokenizer_of_a_stream_learns_from_its_first_train_documents(tmp_path: Path) -> None:
    rows = [{"text": chr(FIRST + number)} for number in range(COUNT)]
    split = Split(None, 0.2)
    train = split.numbers(COUNT, held=False).tolist()
    source = StreamDocuments(rows, "text", "rows", None)
    assert learned(source, split, 10, tmp_path) == train[:10]
