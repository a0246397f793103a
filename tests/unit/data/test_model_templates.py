"""A model's own chat template writes what transformers writes with it, and its answers are those of the assistant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.plan.templates.chat import RecordError
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
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 3}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
CALLS = [
    {"role": "user", "content": "Call."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "Again."},
    {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]},
    {"role": "tool", "content": "8"},
    {"role": "assistant", "content": "It is 8."},
]
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
        replace(
            Plan(),
            {
                "model.name": str(folder),
                "data.template": "model",
                **{f"data.{key}": value for key, value in settings.items()},
            },
        )
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


TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 3}}\n</tool_call>'
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "chat", "answers"),
    [
        ("qwen2.5", said("Hi", "Yo"), ["Yo<|im_end|>\n"]),
        ("qwen2.5", said("Hi", "Yo", "Yo", "Hi"), ["Yo<|im_end|>\n", "Hi<|im_end|>\n"]),
        (
            "qwen2.5",
            CALLS,
            [
                f"{TOOL_CALL}<|im_end|>\n",
                "It is 7.<|im_end|>\n",
                f"Wait.\n{TOOL_CALL}<|im_end|>\n",
                "It is 8.<|im_end|>\n",
            ],
        ),
        ("qwen3", said("Hi", "Yo"), [f"{EMPTY}Yo<|im_end|>\n"]),
        ("qwen3", said("2+2?", THOUGHT), [f"{THOUGHT}<|im_end|>\n"]),
        (
            "qwen3",
            said("2+2?", THOUGHT, "3+3?", "6", "2+2?", THOUGHT),
            ["4<|im_end|>\n", "6<|im_end|>\n", f"{THOUGHT}<|im_end|>\n"],
        ),
        (
            "qwen3",
            CALLS,
            [
                f"{TOOL_CALL}<|im_end|>\n",
                "It is 7.<|im_end|>\n",
                f"Wait.\n{TOOL_CALL}<|im_end|>\n",
                f"{EMPTY}It is 8.<|im_end|>\n",
            ],
        ),
        ("phi-3", said("Hi", "Yo"), ["Yo<|end|>\n<|endoftext|>"]),
        (
            "phi-3",
            said("Hi", "Yo", "Yo", "Hi", "|user|", "|end|"),
            ["Yo<|end|>\n", "Hi<|end|>\n", "|end|<|end|>\n<|endoftext|>"],
        ),
    ],
)
def test_the_answers_of_a_model_are_what_the_assistant_says(
    name: str, chat: list[dict[str, Any]], answers: list[str], tmp_path: Path
) -> None:
    template, _, theirs = own(tmp_path, family(name), loss_on="answers")
    text = template.render({"messages": chat, "tools": TOOLS})
    shown = [{**message, "content": message["content"] or ""} for message in chat]
    assert text == theirs.apply_chat_template(shown, tools=TOOLS, tokenize=False)
    assert [text[start:end] for start, end in text.answers] == answers


def test_arguments_of_calls_that_are_json_text_are_written_once(tmp_path: Path) -> None:
    def called(arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        chat = [*said("Call."), {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": [*chat, {"role": "tool", "content": "7"}]}

    for name in ("qwen2.5", "qwen3", "llama-3"):
        template, _, _ = own(tmp_path, family(name), loss_on="answers")
        text = template.render(called('{"x": 3}'))
        assert text == template.render(called({"x": 3}))
        assert text.answers == template.render(called({"x": 3})).answers
        assert "[3" in template.render(called("[3"))
    joins = (
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{{ m.content }}{% endfor %}"
    )
    text = own(tmp_path, joins)[0].render(called('{"x": 3}'))
    assert 'add{"x": 3}' in text


def test_a_chat_whose_answers_cannot_be_located_is_refused_if_only_they_are_learned(
    tmp_path: Path,
) -> None:
    last = "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}"
    twice = (
        "{% for m in messages[1:2] %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if messages[-1].role != 'user' %}end{% endif %}"
    )
    refuses = (
        "{% if messages[1:2] and 'Yo' not in messages[1].content %}"
        "{{ raise_exception('no') }}{% endif %}" + last
    )
    chat = {"messages": said("Hi", "Yo", "Hm", "Hi")}
    for source in (last, twice, refuses):
        with pytest.raises(RecordError, match=r"does not write messages\[1\] in one piece"):
            own(tmp_path, source, loss_on="answers")[0].render(chat)
        assert own(tmp_path, source)[0].render(chat).answers == ()


@pytest.mark.parametrize("loss_on", ["answers", "all"])
@pytest.mark.parametrize(
    ("name", "unwanted", "only_read"),
    [
        ("qwen2.5", "Bad", "Bad<|im_end|>\n"),
        ("qwen3", THOUGHT, "4<|im_end|>\n"),
        ("phi-3", "Bad", "Bad<|end|>\n"),
        ("llama-3", "Bad", "Bad<|eot_id|>"),
    ],
)
def test_a_message_of_weight_0_is_located_in_the_text_of_a_models_template(
    name: str, unwanted: str, only_read: str, loss_on: str, tmp_path: Path
) -> None:
    template, tokenizer, _ = own(tmp_path, family(name), loss_on=loss_on)
    chat = said("2+2?", unwanted, "Hm", "Good", "Hm", "Best")
    whole = template.render({"messages": chat})
    assert whole.unwritten == ()
    chat[1]["weight"] = 0
    text = template.render({"messages": chat})
    assert text == whole
    assert [text[start:end] for start, end in text.only_read] == [only_read]
    assert text.answers == whole.answers[1:]
    tokens, offsets = encode(tokenizer, [text], loss_on == "answers")[0]
    ((start, stop),) = text.only_read
    learned = text.answers if loss_on == "answers" else ((0, start), (stop, len(text)))
    wanted = [any(a < end and b > begin for begin, end in learned) for a, b in offsets]
    assert (tokens[: len(offsets)] >= 0).tolist() == wanted


LOOP = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("m.content }}", "m.content | tojson(ensure_ascii=False) }}"),
        LOOP.replace("m.content }}", "m.content | tojson(True) }}"),
        LOOP + "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=True) }}",
        LOOP + "{{ tools | tojson(indent=2) }}",
        LOOP + "{{ messages | map(attribute='role') | list }}{{ tools[0] }}",
        LOOP + "{{ nothing }}{{ messages[0].name }}{{ nothing is defined }}{{ documents }}",
        LOOP + "{% if enable_thinking is defined and not enable_thinking %}none{% endif %}",
    ],
)
def test_a_models_template_writes_what_transformers_writes(source: str, tmp_path: Path) -> None:
    template, _, theirs = own(tmp_path, source)
    chat, options = said("Hi é <b>", "Hello."), {"enable_thinking": False, "add": "<|im_end|>"}
    text = template.render({"messages": chat, "tools": TOOLS, "chat_template_kwargs": options})
    assert text == theirs.apply_chat_template(chat, tools=TOOLS, tokenize=False, **options)


def test_a_template_that_asks_for_the_date_writes_the_same_on_every_day(tmp_path: Path) -> None:
    template, _, _ = own(tmp_path, family("llama-3"), loss_on="answers")
    chat: dict[str, Any] = {"messages": said("Hi", "Yo", "Hm", "Hi")}
    text = template.render(chat)
    assert "Today Date: 26 Jul 2024\n" in text
    assert [text[start:end] for start, end in text.answers] == ["Yo<|eot_id|>", "Hi<|eot_id|>"]
    dated = template.render({**chat, "chat_template_kwargs": {"date_string": "1 Jan 2020"}})
    assert "Today Date: 1 Jan 2020\n" in dated
    with pytest.raises(
        RecordError, match='field "chat_template_kwargs" holds text that is no JSON object'
    ):
        template.render({**chat, "chat_template_kwargs": "enable_thinking"})
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    asked: list[dict[str, Any]] = [*said("Hi"), call, {"role": "tool", "content": "7"}]
    text = template.render({"messages": [*asked, *said("", "Seven.")[1:]], "tools": TOOLS})
    said_call = '{"name": "add", "parameters": {"x": 3}}<|eot_id|>'
    assert [text[start:end] for start, end in text.answers] == [said_call, "Seven.<|eot_id|>"]


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
