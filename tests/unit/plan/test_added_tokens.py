"""Added tokens beyond the model's vocabulary, as in Gemma 3 1B, are left out and told; a plan that needs them is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memconsole.memory.estimate import estimate
from memconsole.plan.check import check_start
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.data.text.tokens.tokenizer import load, train
from tests.unit.memory.cards import card
from tests.unit.plan.no_tensors import NO_TENSORS

ENTRIES = 300
IMAGE = "<image_soft_token>"
TEXTS = ["Some words of a text, and some more words.\n"] * 40
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def model(folder: Path, vocab_size: int = ENTRIES, **config: Any) -> Plan:
    """A plan for a model whose tokenizer has `ENTRIES` tokens, and one more that was added."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    made = train(TEXTS * 3 + [f"{i} {i * 7} " * 9 for i in range(200)], ENTRIES)
    assert made.vocab_size == ENTRIES
    made.inner.add_special_tokens([IMAGE])
    made.save(folder / "tokenizer.json")
    settings = {
        "bos_token": "<|endoftext|>",
        "added_tokens_decoder": {str(ENTRIES): {"content": IMAGE, "special": True}},
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return replace(Plan(), {"model.name": str(folder), "device.name": "cpu"})


def test_an_added_token_beyond_the_vocabulary_is_left_out_and_told(tmp_path: Path) -> None:
    plan = model(tmp_path / "base", pad_token=IMAGE, extra_special_tokens={"image_token": IMAGE})
    check_start(plan)
    (note,) = estimate(plan, card(2**34)).notes
    assert note.key == "model.name"
    assert note.words.endswith(
        f'the added token "{IMAGE}" of the tokenizer is beyond the model\'s vocabulary of 300 '
        "and is left out: in a text its name is ordinary text"
    )
    found = load(Path(plan.model.name), ENTRIES)
    assert found.beyond == (IMAGE,)
    assert found.config.more_special == {}
    assert (found.largest_id, found.pad) == (ENTRIES - 1, None)
    text = f"words {IMAGE} words"
    (whole,) = found.encodings([text], controls=True)
    assert max(whole.ids) < ENTRIES
    assert found.decode(whole.ids) == text
    found.save(tmp_path / "tokenizer.json")
    assert load(tmp_path, ENTRIES).fingerprint == found.fingerprint


def test_a_larger_vocabulary_has_a_place_for_the_token(tmp_path: Path) -> None:
    plan = model(tmp_path / "base", ENTRIES + 1)
    check_start(plan)
    assert estimate(plan, card(2**34)).notes == ()
    found = load(Path(plan.model.name), ENTRIES + 1)
    assert (found.beyond, found.largest_id) == ((), ENTRIES)


def test_a_plan_that_needs_the_token_is_refused(tmp_path: Path) -> None:
    plan = model(tmp_path / "ends", eos_token=IMAGE)
    with pytest.raises(PlanError, match=f'"{IMAGE}" begins or ends each text, but its id is not'):
        check_start(plan)
    chats = "{% for message in messages %}" + IMAGE + "{{ message.content }}{% endfor %}"
    plan = replace(model(tmp_path / "writes"), {"data.template": chats})
    with pytest.raises(PlanError, match=f'"{IMAGE}" is written by the template, but its id is not'):
        check_start(plan)


def test_a_tokenizer_with_more_entries_than_the_model_is_refused_before_a_launch(
    tmp_path: Path,
) -> None:
    plan = model(tmp_path / "base", ENTRIES - 1)
    with pytest.raises(PlanError, match="own tokenizer has 300 entries, the model only 299"):
        check_start(plan)
    with pytest.raises(PlanError, match="has token ids up to 299, the model's vocabulary holds"):
        load(Path(plan.model.name), ENTRIES - 1)
