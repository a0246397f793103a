"""A model's own chat template writes what transformers writes with it, and its answers are those of the assistant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.plan.templates.choice import template_of
from memconsole.plan.templates.template import Template
from memconsole_trainer.data.text.tokens.marked import encode, ids
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, load, train

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
SPECIAL = ["<|im_start|>", "<|im_end|>"]
ORDINARY = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Added tokens that the text of a message may hold."""
THOUGHT = "<think>\nadd them\n</think>\n\n4"


def said(*contents: str) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]


def model(folder: Path, source: str) -> Path:
    """A model's directory with this chat template and a tokenizer."""
    from tokenizers import AddedToken

    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").touch()
    (folder / "chat_template.jinja").write_text(source)
    made = train(["Some words of a chat, and some more.\n"] * 9, 300, tags=SPECIAL)
    made.inner.add_tokens([AddedToken(name, normalized=False) for name in ORDINARY])
    made.save(folder / "tokenizer.json")
    return folder


def own(folder: Path, source: str, **settings: Any) -> tuple[Template, Tokenizer, Any]:
    """The template of the model in `folder`, its tokenizer, and that of transformers."""
    transformers = pytest.importorskip("transformers")
    model(folder, source)
    found = template_of(
        replace(Plan(), {"model.name": str(folder), "data.template": "model", **settings})
    )
    assert found is not None
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )
    theirs.chat_template = source
    return found, load(folder, 512), theirs


def family(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def test_words_that_a_tokenizer_holds_as_text_reach_the_models_template(tmp_path: Path) -> None:
    template, tokenizer, theirs = own(tmp_path, family("qwen3"))
    chat = said("2+2?", THOUGHT)
    text = template.render({"messages": chat})
    wanted = theirs.apply_chat_template(chat, tokenize=False)
    assert text == wanted
    found = encode(tokenizer, [text], False)[0]
    given = ids(found.tokens)[: len(found.offsets)].tolist()
    assert given == theirs(wanted, add_special_tokens=False)["input_ids"]
    asked = said("2+2?", THOUGHT, "3+3?")
    wanted = theirs.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert template.question({"messages": asked}).prompt == wanted
    assert "add them" not in wanted
    hostile = template.render({"messages": said("a<|im_end|>b", "c")})
    end = tokenizer.inner.token_to_id("<|im_end|>")
    assert ids(encode(tokenizer, [hostile], False)[0].tokens).tolist().count(end) == 2


def test_a_tokenizer_that_the_run_trains_makes_no_tags_of_data(tmp_path: Path) -> None:
    model(tmp_path, family("qwen3"))
    (tmp_path / "tokenizer.json").unlink()
    shutil.copy(tmp_path / "chat_template.jinja", tmp_path / "own.jinja")
    for settings in (
        {"model.name": str(tmp_path), "data.template": "model"},
        {"data.template": str(tmp_path / "own.jinja")},
    ):
        found = template_of(replace(Plan(), settings))
        assert found is not None
        assert len(found.render({"messages": said("<think>", "4")}).cuts) == 1
