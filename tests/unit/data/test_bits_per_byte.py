"""Which bytes of text a token covers: exactly its own with byte-level tokenizers, all of them with any."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from memconsole.plan import catalog
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks.language import MASKED
from memconsole_trainer.data.sources.documents import FileDocuments
from memconsole_trainer.data.sources.split import Split
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text.rows.validation import from_texts
from memconsole_trainer.data.text.tokens import tokenizer as tokenizers
from memconsole_trainer.data.text.tokens.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    bytes_by_offsets,
    of_characters,
)
from memconsole_trainer.engine import LossSum
from memconsole_trainer.tasks.language import open_data

TEXTS = ["the quick brown fox — naïve café, 東京 🦊. " * 20, "def f(x):\n    return x + 1\n" * 30]
BYTE_LEVEL = tokenizers.train(TEXTS, 300)
texts = st.text().map(lambda text: text.encode("utf-8", "ignore").decode())


def lowered() -> Tokenizer:
    """Words of a fixed list in lower case, without spaces: not byte-level, and it loses characters."""
    inner = library.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(
        vocab_size=60, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    return Tokenizer(inner)


LOWERED = lowered()


@settings(deadline=None)
@given(texts)
def test_a_byte_level_tokens_bytes_are_those_it_decodes_to(text: str) -> None:
    ids, covered = BYTE_LEVEL.encode_measured(text)
    np.testing.assert_array_equal(ids, BYTE_LEVEL.encode([text]))
    whole = b""
    for index, size in zip(ids[:-1].tolist(), covered[:-1].tolist(), strict=True):
        piece = BYTE_LEVEL._inner.id_to_token(index)
        assert len(piece) == size
        whole += bytes(from_alphabet()[c] for c in piece)
    assert whole == text.encode()
    assert covered[-1:].sum() == 0


def from_alphabet() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, inverted: printable bytes stand for themselves, others from 256 on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {chr(b): b for b in kept} | {chr(256 + n): b for n, b in enumerate(others)}


def test_an_end_of_text_that_a_document_spells_covers_its_letters() -> None:
    text = f"a{END_OF_TEXT}b"
    ids, covered = BYTE_LEVEL.encode_measured(text)
    assert ids.tolist().count(BYTE_LEVEL.end_of_text) == 1
    assert covered.sum() == len(text)
    assert covered[-1] == 0


@settings(deadline=None)
@given(texts)
def test_any_other_tokenizers_tokens_cover_all_bytes_but_those_of_unknown_ones(text: str) -> None:
    ids, covered = LOWERED.encode_measured(text)
    assert len(ids) == len(covered)
    every = bytes_by_offsets(text, LOWERED.encodings([text])[0].offsets)
    assert (every >= 0).all()
    if len(every):
        assert every.sum() == len(text.encode())
    if not len(ids):
        return  # a text without text gives no tokens
    known = ids[:-1] != LOWERED.inner.token_to_id("[UNK]")
    assert covered[:-1].tolist() == (every * known).tolist()
    assert covered[-1] == 0


def test_tokens_of_words_cover_the_space_before_them() -> None:
    _, covered = LOWERED.encode_measured("The")
    assert covered.sum() == 3
    one, _ = LOWERED.encode_measured("fox")
    ids, covered = LOWERED.encode_measured("fox fox  ")
    assert len(ids) == 2 * (len(one) - 1) + 1
    assert covered[: len(one) - 1].sum() == 3
    assert covered[len(one) - 1 :].sum() == 6


def test_masked_and_left_out_targets_count_for_nothing(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(TEXTS[number % 2][: 150 + number])
    source = FileDocuments(sorted(tmp_path.glob("*.txt")))
    found = from_texts(source, Split(6, 0.5), BYTE_LEVEL, 16)
    shape = BatchShape(1, 4, 16)
    for limit in (0, 1, 2):
        targets = np.concatenate(
            [b["targets"][b["targets"] != MASKED] for b in found.batches(shape, limit)]
        )
        table = BYTE_LEVEL.id_bytes
        assert table is not None
        expected = table[targets[targets != BYTE_LEVEL.end_of_text]].sum()
        assert found.target_bytes(shape, limit) == expected


class Told:
    """A `Teller` that keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def phase(self, phase: str, detail: str = "") -> None: ...

    def warning(self, message: str) -> None:
        self.warnings.append(message)

    def tick(self) -> None: ...


KNOWN = "abcdefghij"
UNKNOWNS: list[tuple[models.Model, int | None]] = [
    (models.WordLevel({"a": 0, "?": 1}, unk_token="?"), 1),
    (models.BPE({"a": 0, "?": 1}, [], unk_token="?"), 1),
    (models.BPE({"a": 0, END_OF_TEXT: 1}, [], unk_token=END_OF_TEXT), None),
    (models.BPE({"a": 0}, []), None),
    (models.Unigram([("a", -1.0), ("?", 0.0)], 1, False), 1),
    (models.Unigram([("a", -1.0)], None, False), None),
]


@pytest.mark.parametrize(("model", "unknown"), UNKNOWNS)
def test_the_unknown_token_is_the_models(model: models.Model, unknown: int | None) -> None:
    assert Tokenizer(library.Tokenizer(model)).unknown == unknown


@pytest.mark.parametrize("template", [None, "{{ text }}"])
@pytest.mark.parametrize(("unknown", "reported"), [(1, True), (9, False)])
def test_bytes_of_unknown_text_do_not_count_and_much_of_it_leaves_no_bits_per_byte(
    template: str | None, unknown: int, reported: bool, tmp_path: Path
) -> None:
    of_characters([KNOWN], 64).save(tmp_path / "tokenizer.json")
    path = tmp_path / "data.jsonl"
    texts = [KNOWN, KNOWN * 50 + "日" * unknown]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plan = replace(
        Plan(),
        {
            "data.source": str(path), "data.tokenizer": str(tmp_path / "tokenizer.json"),
            "data.held_out": "last", "data.validation_fraction": 0.5, "data.template": template,
            "model.target_params": 200_000,
        },
    )  # fmt: skip
    told = Told()
    data = open_data(plan, catalog.model(plan), tmp_path, told, {})
    shape = BatchShape(1, 2, plan.data.sequence_length)
    covered = len(KNOWN * 50) - 1  # the first character is no target
    bits = data.judged(LossSum(math.log(2) * covered, 1.0), shape, 0, None, list).bits_per_byte
    if reported:
        assert told.warnings == []
        assert bits == pytest.approx(1.0)
    else:
        assert bits is None
        (warning,) = told.warnings
        assert "1.8% of the held-out tokens" in warning
        assert "data.tokenizer" in warning
