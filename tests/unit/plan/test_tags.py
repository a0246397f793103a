"""A chat template whose tags the tokenizer does not know is told, and none whose tags it knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from memconsole.announcing import launch_rows
from memconsole.cli.plans.plan_words import document, text
from memconsole.memory.estimate import estimate
from memconsole.plan.data.tags import chat_tags, tag_notes
from memconsole.plan.plan import Plan, replace
from memconsole_trainer.data.text.tokens.tokenizer import load, train
from tests.unit.memory.cards import card

TEXTS = ["Some words of a chat, and some more words.\n"] * 40
CHATML = ("<|im_start|>", "<|im_end|>")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
PIECES = Path(__file__).parents[2] / "data" / "sentencepiece"


def model(folder: Path, tags: tuple[str, ...], template: str = "") -> Path:
    """A model's directory whose tokenizer knows `tags`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").touch()
    train(TEXTS, 400, tags=tags).save(folder / "tokenizer.json")
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def plan(source: Path | str, **changes: Any) -> Plan:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    chats = {"data.template": "chatml", "device.name": "cpu"}
    return replace(Plan(), {"model.name": str(source), **chats, **named})


def told(plan: Plan) -> list[str]:
    return [note.words for note in tag_notes(plan)]


def test_tags_that_are_no_tokens_of_the_model_are_told_before_a_launch(tmp_path: Path) -> None:
    unknown = plan(model(tmp_path / "base", ()))
    words = (
        'data.template = "chatml": <|im_start|> and <|im_end|> are no tokens of the model\'s own '
        "tokenizer; each is split into several ordinary tokens, which the trained weights have not "
        "seen as a tag; data.template = plain writes chats without tags"
    )
    found = estimate(unknown, card(2**34))
    assert f"\nnote: {words}\n" in text(unknown, found)
    assert document(unknown, found)["notes"] == [{"key": "data.template", "words": words}]
    assert ("note", words) in launch_rows(unknown, found)
    known = plan(model(tmp_path / "chat", CHATML))
    assert estimate(known, card(2**34)).notes == ()


def test_the_models_own_template_is_proposed_and_is_never_doubted(tmp_path: Path) -> None:
    own = (
        "{% for message in messages %}<<SYS>>[{{ message.role }}] {{ message.content }}{% endfor %}"
    )
    other = plan(model(tmp_path / "own", ("<|im_end|>",), own))
    (words,) = told(other)
    assert words.startswith('data.template = "chatml": <|im_start|> is no token of')
    assert "it is split" in words
    assert words.endswith("; data.template = model writes chats as this model knows them")
    assert told(replace(other, {"data.template": "model"})) == []


def test_a_tokenizer_that_the_run_trains_has_a_token_for_each_tag(tmp_path: Path) -> None:
    scratch = plan("stories")
    assert told(scratch) == []
    trained = train(TEXTS, 400, tags=chat_tags(scratch))
    assert chat_tags(scratch) == CHATML
    assert all(trained.reads_whole(tag) for tag in CHATML)
    other = model(tmp_path / "other", ())
    (words,) = told(replace(scratch, {"data.tokenizer": str(other / "tokenizer.json")}))
    assert "are no tokens of data.tokenizer; each is split into several ordinary tokens; " in words


@pytest.mark.parametrize("template", [None, "plain", "prompt", "equipment", "<a> {{ text }}"])
def test_templates_without_tags_of_chats_say_nothing(template: str | None, tmp_path: Path) -> None:
    assert told(plan(model(tmp_path / "base", ()), data__template=template)) == []


def test_a_template_in_a_file_is_told_too(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}<|turn|>{{ message.content }}{% endfor %}")
    (words,) = told(plan(model(tmp_path / "base", ()), data__template=str(file)))
    assert "<|turn|> is no token" in words


def merges(folder: Path) -> None:
    made = train(TEXTS, 400)
    made.inner.model.save(str(folder))
    added = {str(made.vocab_size): {"content": "<|im_start|>", "special": True}}
    settings = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def pieces(folder: Path) -> None:
    shutil.copy(PIECES / "gemma.model", folder / "tokenizer.model")


def whole(folder: Path) -> None:
    train(TEXTS, 400, tags=("<tag>", "<|im_end|>")).save(folder / "tokenizer.json")


@pytest.mark.parametrize("make", [merges, pieces, whole])
def test_the_files_tell_what_the_trainers_tokenizer_does(make: Any, tmp_path: Path) -> None:
    make(tmp_path)
    tags = (*CHATML, "<tag>", "<other>")
    template = "{% for message in messages %}" + "".join(tags) + "{{ message.content }}{% endfor %}"
    (words,) = told(plan("stories", data__template=template, data__tokenizer=str(tmp_path)))
    tokenizer = load(tmp_path, 1000)
    read = [tag for tag in tags if tokenizer.reads_whole(tag)]
    assert read
    told_tags = words.partition('endfor %}": ')[2].partition(" no token")[0]
    assert [tag for tag in tags if tag not in told_tags] == read
