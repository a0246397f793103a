"""A model's own tokenizer gives the ids of the library that made it, in every form it is stored in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memconsole.plan.models.tokenizer_file import control_tokens, tokenizer_vocab_size
from memconsole.plan.plan import PlanError
from memconsole.plan.templates.template import Template
from memconsole_trainer.data.text.tokens import marked
from memconsole_trainer.data.text.tokens.tokenizer import END_OF_TEXT, Tokenizer, load, train

PIECES = Path(__file__).parents[2] / "data" / "sentencepiece"
EXPECTED = json.loads((PIECES / "expected.json").read_text())
TEXTS = [*EXPECTED["texts"], "It's 2026, isn't it?\r\n\r\n  Yes!!  ٣ words", "ÅÅ e\u0301\u00e9"]


def model(folder: Path, name: str, **config: Any) -> Path:
    """A directory with a SentencePiece model and a tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    shutil.copy(PIECES / f"{name}.model", folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", sorted(EXPECTED["ids"]))
def test_a_sentencepiece_model_gives_the_ids_and_texts_of_its_library(
    name: str, tmp_path: Path
) -> None:
    found = load(model(tmp_path, name), 1000)
    assert (found.begin, found.end_of_text) == ((1,), 2)
    for text, ids, decoded in zip(
        EXPECTED["texts"], EXPECTED["ids"][name], EXPECTED["decoded"][name], strict=True
    ):
        assert found.encode([text]).tolist() == ([1, *ids, 2] if ids else [])
        assert found.prompt(text) == [1, *ids]
        if " ⁇ " not in decoded:
            assert found.decode(ids) == decoded
        if found.unknown not in ids:
            assert found.encode_measured(text)[1].sum() == len(text.encode())
    entries = 66 if name == "unigram" else 420
    assert tokenizer_vocab_size(str(tmp_path)) == found.vocab_size == entries
    assert control_tokens(str(tmp_path)) == ("<s>", "</s>")
    found.save(tmp_path / "tokenizer.json")
    again = load(tmp_path, 1000)
    assert again.begin == found.begin
    assert again.encode(EXPECTED["texts"]).tolist() == found.encode(EXPECTED["texts"]).tolist()


def test_what_continues_a_prompt_keeps_the_space_before_its_first_word(tmp_path: Path) -> None:
    found = load(model(tmp_path, "bpe"), 1000)
    prompt, whole = found.prompt("The lazy"), found.prompt("The lazy dog")
    assert found.continuation(prompt, [*whole[len(prompt) :], 2]) == " dog"


def bytes_level(folder: Path, kind: str, **config: Any) -> Tokenizer:
    """Vocabulary and merges as GPT-2 and Qwen store them, and the tokenizer that wrote them."""
    made = train([text * 9 for text in TEXTS], 400)
    made._inner.model.save(str(folder))
    settings = {"tokenizer_class": kind, "eos_token": END_OF_TEXT, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def test_vocabulary_and_merges_give_the_ids_of_gpt2(tmp_path: Path) -> None:
    made = bytes_level(tmp_path, "GPT2Tokenizer")
    found = load(tmp_path, 400)
    for text in TEXTS:
        assert np.array_equal(found.encode([text]), made.encode([text]))
    assert found.begin == ()
    assert tokenizer_vocab_size(str(tmp_path)) == made.vocab_size


def test_qwen_cuts_words_its_own_way(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    bytes_level(tmp_path, "Qwen2Tokenizer")
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    rules = (tmp_path / "merges.txt").read_text().splitlines()[1:]
    oracle = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=[tuple(rule.split(" ")) for rule in rules]
    )
    found = load(tmp_path, 400)
    for text in TEXTS:
        assert found.prompt(text)[: len(text)] == (oracle.encode(text) or [0])[: len(text)]


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    bytes_level(tmp_path, "RobertaTokenizer")
    with pytest.raises(PlanError, match="how robertatokenizer cuts a text into words is not known"):
        load(tmp_path, 400)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(
        PlanError, match=r"no such tokenizer; expected tokenizer\.json, tokenizer\."
    ):
        load(tmp_path, 400)


def test_the_configuration_decides_what_begins_and_ends_a_text(tmp_path: Path) -> None:
    plain = load(model(tmp_path, "bpe", add_bos_token=False, eos_token="</s>"), 1000)
    assert plain.begin == ()
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    begun = load(model(tmp_path, "bpe", **named), 1000)
    assert (begun.begin, begun.end_of_text) == ((1,), 2)
    turn = {"420": {"content": "<|turn|>", "special": True}}
    chat = load(model(tmp_path, "bpe", **named | {"eos_token": "<|turn|>"}, added_tokens_decoder=turn), 1000)  # fmt: skip
    assert (chat.end_of_text, chat.vocab_size) == (420, 421)
    assert "<|turn|>" in control_tokens(str(tmp_path))
    wrong = {"5": {"content": "<|turn|>", "special": True}}
    with pytest.raises(
        PlanError, match=r"says that <\|turn\|> is token 5, but the vocabulary says that it is"
    ):
        load(model(tmp_path, "bpe", added_tokens_decoder=wrong), 1000)


def test_the_added_tokens_of_an_older_folder_have_a_file_of_their_own(tmp_path: Path) -> None:
    named = {"bos_token": "<s>", "eos_token": "<|turn|>", "add_bos_token": True}
    folder = model(tmp_path, "bpe", **named)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|turn|>": 421, "<|more|>": 420}))
    found = load(folder, 1000)
    assert (found.end_of_text, found.vocab_size) == (421, 422)
    assert tokenizer_vocab_size(str(tmp_path)) == 422
    assert "<|turn|>" in control_tokens(str(tmp_path))
    assert found.encode(["a<|more|>b"]).tolist().count(420) == 1


def test_the_name_of_a_control_token_in_a_text_stays_text(tmp_path: Path) -> None:
    found = load(model(tmp_path, "bpe"), 1000)
    for text in ("a</s>b <s>", f"</s>{END_OF_TEXT}"):
        ids = found.encode([text]).tolist()
        assert ids[0] == 1
        assert ids[-1] == 2
        assert not {1, 2} & set(ids[1:-1])
        assert found.decode(ids[1:-1]) == text
    made = train(TEXTS, 400)
    assert made.encode([f"a{END_OF_TEXT}b"]).tolist().count(0) == 1


def test_a_record_begins_and_ends_once_whether_or_not_its_template_says_so(tmp_path: Path) -> None:
    found = load(model(tmp_path, "gemma"), 1000)
    for source in ("{{ a }}", "<s>{{ a }}", "<s>{{ a }}</s>", "<s>{{ a }}</s>\n"):
        template = Template(source + "{% generation %}{% endgeneration %}", ("<s>", "</s>"))
        one = marked.encode(found, [template.render({"a": "dog <s>"})], False)[0].tokens.tolist()
        assert one.count(1) == one.count(2) == 1
        assert one[0] == 1


def test_the_tokens_that_begin_a_record_are_not_learned_with_its_answer(tmp_path: Path) -> None:
    found = load(model(tmp_path, "gemma"), 1000)
    template = Template("{% generation %}{{ a }}{% endgeneration %}", ("<s>", "</s>"))
    one = marked.encode(found, [template.render({"a": "dog"})], True)[0]
    assert one.tokens[0] == ~1
    assert (one.tokens[1:] >= 0).all()
    assert len(one.offsets) == len(one.tokens) - 1


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    folder = model(tmp_path, "bpe")
    whole = (folder / "tokenizer.model").read_bytes()
    for damaged in (whole[:100], b"\x0b" + whole, b"", b"{}" * 40):
        (folder / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(PlanError, match=r"tokenizer\.model: not a tokenizer"):
            load(folder, 1000)
        with pytest.raises(PlanError, match="not a tokenizer"):
            tokenizer_vocab_size(str(folder))
