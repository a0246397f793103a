"""The tokenizer of a run, and what is measured with it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.plan.models.sizing import size
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.tasks.language import MASKED
from memconsole_trainer.data.sources.documents import FileDocuments
from memconsole_trainer.data.sources.split import Split
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text.opened import alone
from memconsole_trainer.data.text.prepared import prepare
from memconsole_trainer.data.text.run_tokenizer import make_tokenizer
from memconsole_trainer.data.text.tokens import tokenizer as tokenizers
from memconsole_trainer.data.text.tokens.tokenizer import END_OF_TEXT

TEXTS = ["the quick brown fox jumps over the lazy dog. " * 20, "def f(x):\n    return x + 1\n" * 30]
TRAINED = tokenizers.train(TEXTS, 300)


@given(st.text())
def test_every_text_is_encoded_without_unknowns_and_decoded_as_it_was(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ids = TRAINED.encode([text])
    assert ids[-1:].tolist() == [TRAINED.end_of_text] * bool(text)
    assert TRAINED.decode(ids[:-1].tolist()) == text


def test_the_vocabulary_is_as_large_as_asked_and_ids_are_small() -> None:
    assert TRAINED.vocab_size == 300
    assert TRAINED.largest_id == 299
    assert TRAINED.encode(TEXTS).dtype == np.uint16
    assert TRAINED.end_of_text == 0


def test_training_twice_gives_the_same_tokenizer_even_in_another_process() -> None:
    code = (
        "import sys; from memconsole_trainer.data.text.tokens.tokenizer import train;"
        "print(train(eval(sys.stdin.read()), 300).fingerprint)"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], input=repr(TEXTS), text=True, capture_output=True, check=True
    )
    assert there.stdout.strip() == TRAINED.fingerprint


def test_a_saved_tokenizer_is_loaded_and_refused_when_larger_than_the_model(tmp_path: Path) -> None:
    TRAINED.save(tmp_path / "tokenizer.json")
    again = tokenizers.load(tmp_path / "tokenizer.json", 320)
    assert again.fingerprint == TRAINED.fingerprint
    assert tokenizers.load(tmp_path, 320).fingerprint == TRAINED.fingerprint
    with pytest.raises(PlanError, match=r"ids up to 299, the model's vocabulary holds 299"):
        tokenizers.load(tmp_path, 299)
    with pytest.raises(PlanError, match=r"no such tokenizer"):
        tokenizers.load(tmp_path / "none.json", 320)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(PlanError, match="not a tokenizer"):
        tokenizers.load(tmp_path / "bad.json", 320)


def corpus(tmp_path: Path) -> FileDocuments:
    files = []
    for i in range(40):
        files.append(tmp_path / f"{i:02d}.txt")
        files[-1].write_text(f"document {i}: " + f"words and more words {i % 7} again " * 20)
    return FileDocuments(files)


@pytest.mark.parametrize("streaming", [True, False])
def test_counts_bytes_and_the_unigram_model_agree_with_counting_by_hand(
    streaming: bool, tmp_path: Path
) -> None:
    source, architecture = corpus(tmp_path), size(200_000, 300, 64)
    plan = replace(Plan(), {"data.streaming": streaming, "data.sequence_length": 16})
    split = Split(source.count, 0.1)
    saved = tmp_path / "tokenizer.json"
    tokenizer = make_tokenizer(plan, architecture, alone(plan, source, split), saved, None)
    assert tokenizer is not None
    data = prepare(
        plan,
        architecture,
        alone(plan, source, split),
        tokenizer,
        tmp_path / "data.json",
        lambda: None,
    )
    held = split.held_out(0, 40)
    texts = source.read(0, 40)
    train_ids = tokenizer.encode([t for t, h in zip(texts, held, strict=True) if not h])
    validation_texts = [t for t, h in zip(texts, held, strict=True) if h]
    validation_ids = tokenizer.encode(validation_texts)
    assert data.portions[0].exact
    assert data.portions[0].train_tokens == len(train_ids)
    np.testing.assert_array_equal(data.counts, np.bincount(train_ids, minlength=300))
    shape = BatchShape(1, 4, 16)
    targets = np.concatenate(
        [b["targets"][b["targets"] != MASKED] for b in data.validation.batches(shape, 0)]
    )
    np.testing.assert_array_equal(targets, validation_ids[1:])
    total = sum(len(t.encode()) for t in validation_texts)
    first = len(tokenizer.decode(validation_ids[:1].tolist()).encode())  # is never a target
    assert data.validation.target_bytes(shape, 0) == total - first
    smoothed = (np.bincount(train_ids, minlength=300) + 1) / (len(train_ids) + 300)
    expected = -np.log(smoothed[targets]).mean()
    assert data.validation.unigram_loss(data.counts, shape, 0) == pytest.approx(expected)
    assert expected < math.log(300)
    rows = -(-(len(train_ids) - 1) // 16)
    assert data.steps_per_epoch(shape) == -(-rows // 4)


def test_the_measure_is_remembered_for_the_same_data_and_redone_for_other_data(
    tmp_path: Path,
) -> None:
    source, architecture, plan = corpus(tmp_path), size(200_000, 300, 64), Plan()
    split = Split(source.count, 0.1)
    cache = tmp_path / "data.json"

    def prepared(source: FileDocuments) -> int:
        opened = alone(plan, source, split)
        found = prepare(plan, architecture, opened, TRAINED, cache, lambda: None)
        return found.portions[0].train_tokens

    first = prepared(source)
    before = cache.read_bytes()
    assert prepared(source) == first
    assert cache.read_bytes() == before
    (tmp_path / "00.txt").write_text("short")
    assert prepared(corpus_again(tmp_path)) < first


def corpus_again(tmp_path: Path) -> FileDocuments:
    return FileDocuments(sorted(tmp_path.glob("[0-9][0-9].txt")))


def test_the_runs_own_tokenizer_is_never_replaced(tmp_path: Path) -> None:
    saved = tmp_path / "tokenizer.json"
    TRAINED.save(saved)
    source = corpus(tmp_path)
    tokenizer = make_tokenizer(
        Plan(),
        size(200_000, 300, 64),
        alone(Plan(), source, Split(source.count, 0.1)),
        saved,
        None,
    )
    assert tokenizer is not None
    assert tokenizer.fingerprint == TRAINED.fingerprint
    assert END_OF_TEXT in tokenizer.decode([0])


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    with pytest.raises(PlanError, match="at least 257"):
        make_tokenizer(
            Plan(),
            size(200_000, 100, 64),
            alone(Plan(), source, Split(40, 0.1)),
            tmp_path / "t.json",
            None,
        )
