"""The files beside exported weights carry over what the model that was fine-tuned says of its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from memconsole.plan.plan import Plan, replace
from memconsole.plan.templates.choice import template_of
from memconsole_trainer.data.sources.records import Record
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, load, train
from memconsole_trainer.tasks.answering import Answerer
from memconsole_trainer.weights import tokenizer_export
from memconsole_trainer.weights.export_run import adapter_notes

CHATML = ("<|im_start|>", "<|im_end|>")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model's directory without weights, whose tokenizer knows the tags of chats."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    train(["some words of a chat\n"] * 40, 300, tags=CHATML).save(folder / "tokenizer.json")
    return folder


def plan_of(base: Path, **changes: Any) -> Plan:
    return replace(Plan(), {"model.name": str(base), "data.template": "chatml", **changes})


def written(base: Path, out: Path) -> dict[str, Any]:
    """The files that are written beside the weights of a chat model that was fine-tuned from `base`."""
    out.mkdir()
    tokenizer_export.write(plan_of(base), load(base, 320), 64, out)
    return {path.name: json.loads(path.read_text()) for path in out.glob("*.json")}


def id_of(tokenizer: Tokenizer, name: str) -> int:
    found: int = tokenizer.inner.token_to_id(name)
    return found


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_generation_stops_at_the_end_tokens_of_the_base_too(
    file: str, base: Path, tmp_path: Path
) -> None:
    tokenizer = load(base, 320)
    end, first = (id_of(tokenizer, name) for name in ("<|im_end|>", "<|im_start|>"))
    before = json.loads((base / file).read_text()) if (base / file).exists() else {}
    (base / file).write_text(json.dumps({**before, "eos_token_id": [end, first, 7, 9_999]}))
    plan = plan_of(base)
    assert tokenizer_export.stop_tokens(plan, tokenizer) == (0, end, first)  # 7 is ordinary text
    found = written(base, tmp_path / "out")
    assert found["generation_config.json"]["eos_token_id"] == [0, end, first]
    template = template_of(plan)
    assert template is not None
    ends = tokenizer_export.ends_of_source(plan, tokenizer)
    engine = Mock()
    engine.generate.return_value = [*tokenizer.prompt("words"), first]
    chat = Record("a chat", {"messages": [{"role": "user", "content": "?"}]})
    assert Answerer(template, tokenizer, 16, 200, ends).answer(engine, chat).text == "words"
    assert set(engine.generate.call_args.args[2].stop) == {0, end, first}


def test_the_tokenizers_sides_length_and_further_special_tokens_are_kept(
    base: Path, tmp_path: Path
) -> None:
    file = base / "tokenizer_config.json"
    own = json.loads(file.read_text())
    kept = {"padding_side": "left", "truncation_side": "left", "model_max_length": 10**30}
    start = {"content": "<|im_start|>", "lstrip": False}
    for number, (key, named, found) in enumerate(
        [
            ("additional_special_tokens", [start, "<|im_end|>"], ["<|im_start|>", "<|im_end|>"]),
            ("extra_special_tokens", {"turn_token": start}, {"turn_token": "<|im_start|>"}),
        ]
    ):
        file.write_text(json.dumps({**own, **kept, key: named}))
        load(base, 320).save(tmp_path / "tokenizer.json")  # as a run keeps it
        assert load(tmp_path, 320).config.more_special == {key: found}
        settings = written(base, tmp_path / f"out {number}")["tokenizer_config.json"]
        assert settings.items() >= {**kept, key: found}.items()
        again = AutoTokenizer.from_pretrained(tmp_path / f"out {number}")
        assert (again.padding_side, again.truncation_side) == ("left", "left")
        assert again.model_max_length == 10**30
        assert "<|im_start|>" in again.all_special_tokens
    file.write_text(json.dumps(own))
    assert written(base, tmp_path / "plain")["tokenizer_config.json"]["model_max_length"] == 64


def test_adapters_of_a_quantized_base_are_exported_with_a_warning() -> None:
    adapted = {"optimize.lora_rank": 2, "optimize.freeze_base": True}
    assert adapter_notes(replace(Plan(), adapted)) == []
    for storage in ("int8", "nf4"):
        (note,) = adapter_notes(replace(Plan(), {**adapted, "optimize.base_storage": storage}))
        assert f"trained on a base in {storage} (optimize.base_storage)" in note


def test_generation_settings_that_sample_does_not_follow_are_kept_and_told(
    base: Path, tmp_path: Path
) -> None:
    file = base / "generation_config.json"
    file.write_text('{"temperature": 0.7, "repetition_penalty": 1.0, "no_repeat_ngram_size": null}')
    assert tokenizer_export.generation_notes(plan_of(base)) == []
    file.write_text('{"temperature": 0.7, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}')
    (note,) = tokenizer_export.generation_notes(plan_of(base))
    assert (
        "(repetition_penalty = 1.3, no_repeat_ngram_size = 2), memconsole sample does not" in note
    )
    found = written(base, tmp_path / "out")["generation_config.json"]
    assert (found["temperature"], found["repetition_penalty"]) == (0.7, 1.3)
