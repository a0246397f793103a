"""`memconsole data make preferences`: what it writes, and that both stages of training read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan.data.made import Size
from memconsole.plan.plan import Plan, replace
from memconsole.plan.templates.choice import template_of
from memconsole.plan.templates.preference import PairTemplate
from memconsole_trainer.data.make.__main__ import make
from memconsole_trainer.data.make.maker import Facts, Request
from memconsole_trainer.data.make.preferences import SAFETY


def made(out: Path, size: Size, seed: int = 0) -> Facts:
    return make(Request("preferences", out, size, seed, {}))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "pairs.jsonl"
    made(path, Size(600, None))
    return path


def test_only_the_preferred_answer_begins_with_safety(path: Path) -> None:
    pairs = rows(path)
    assert len(pairs) == 600
    for pair in pairs:
        safety, chosen = next((s, pair["chosen"]) for s in SAFETY if pair["chosen"].startswith(s))
        assert chosen == f"{safety} {pair['rejected']}"
    assert {s for s in SAFETY for pair in pairs if pair["chosen"].startswith(s)} == set(SAFETY)
    learned = sum(pair["completion"] == pair["chosen"] for pair in pairs)
    assert 250 < learned < 350, "either answer is to be learned with equal chances"


def test_the_same_seed_writes_the_same_pairs_and_a_larger_file_goes_on(
    path: Path, tmp_path: Path
) -> None:
    facts = made(tmp_path / "again.jsonl", Size(None, 20_000))
    again = rows(tmp_path / "again.jsonl")
    assert facts == {"pairs": len(again), "size_bytes": (tmp_path / "again.jsonl").stat().st_size}
    assert 20_000 <= facts["size_bytes"] < 20_400
    assert rows(path)[: len(again)] == again
    made(tmp_path / "other.jsonl", Size(10, None), seed=1)
    assert rows(tmp_path / "other.jsonl") != again[:10]


def test_next_token_loss_learns_the_completion_and_dpo_both_answers(path: Path) -> None:
    settings = {"data.source": str(path), "data.template": "chatml"}
    chat = template_of(replace(Plan(), settings))
    pairs = template_of(replace(Plan(), settings | {"train.objective": "dpo"}))
    assert chat is not None
    assert isinstance(pairs, PairTemplate)
    for record in rows(path)[:20]:
        pair = pairs.render(record)
        texts = {
            "completion": chat.render(record),
            "chosen": pair.chosen,
            "rejected": pair.rejected,
        }
        for field, text in texts.items():
            assert f"user\n{record['prompt']}<|im_end|>" in text
            assert [text[start:end] for start, end in text.answers] == [
                f"{record[field]}<|im_end|>"
            ]
