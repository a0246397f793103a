"""`memconsole chat`: what reaches the model, what does not, and how tokens are drawn."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from memconsole.cli.runs.chat import command
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.templates.choice import template_of
from memconsole_trainer import chat
from memconsole_trainer import command as trainer_command
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, train
from memconsole_trainer.engine import OnTokens, Sampling
from memconsole_trainer.sample import asked

PLAN = replace(Plan(), {"data.template": "chatml"})


class Model:
    """Answers every message alike, and keeps the prompts and temperatures that it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[str] = []
        self.temperatures: list[float] = []

    def generate(
        self, prompt: Sequence[int], tokens: int, sampling: Sampling, on_tokens: OnTokens | None
    ) -> list[int]:
        self.prompts.append(self.tokenizer.decode(prompt))
        self.temperatures.append(sampling.temperature)
        return self.tokenizer.prompt("hello")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    tokenizer = train(["hello there"] * 9, 300, tags=["<|im_start|>", "<|im_end|>"])
    found = SimpleNamespace(
        plan=PLAN,
        checkpoint=SimpleNamespace(step=1200),
        note="",
        architecture=SimpleNamespace(max_positions=256),
    )
    model = Model(tokenizer)
    monkeypatch.setattr(chat.trained, "read", lambda *_: found)
    monkeypatch.setattr(chat, "ready", lambda _: (tokenizer, model))
    return model


def talked(monkeypatch: pytest.MonkeyPatch, words: str, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    monkeypatch.setattr(sys, "argv", ["", "run", *options])
    return chat.main()


def test_chat_takes_the_likeliest_token_and_says_that_it_loads(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talked(monkeypatch, "hi\n") == 0
    said = capsys.readouterr()
    assert said.err.startswith("loading the weights of step 1,200 ...\n")
    assert said.out == "hello\n"
    assert talked(monkeypatch, "hi\n", "--temperature=0.5") == 0
    assert model.temperatures == [0.0, 0.5]
    (shown,) = (p.help for p in command.params if p.name == "temperature")
    assert shown == "Default: 0, which takes the likeliest token."


def test_values_for_the_template_reach_every_message_of_a_chat(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "{% for m in messages %}{{ m.content }};{% endfor %}{{ tools[0] }}{{ word }};"
    plan = replace(PLAN, {"data.template": source})
    monkeypatch.setattr(chat, "template_of", lambda _: template_of(plan))
    given = ('--record=chat_template_kwargs={"word": "quick"}', '--record=tools=["add"]')
    assert talked(monkeypatch, "hi\nyou\n", *given) == 0
    assert [prompt.count("addquick;") for prompt in model.prompts] == [1, 1]
    assert talked(monkeypatch, "hi\n", "--record=tool=[]") == 2
    assert (
        "expected FIELD=VALUE with one of system, tools, chat_template_kwargs"
        in capsys.readouterr().err
    )


def test_a_message_to_sample_may_have_values_for_its_template() -> None:
    fields = ["system=Be brief.", 'tools=["add"]']
    assert asked(PLAN, fields, "hi") == {
        "system": "Be brief.",
        "tools": '["add"]',
        "messages": [{"role": "user", "content": "hi"}],
    }
    with pytest.raises(PlanError, match="the run answers chats: give --message"):
        asked(PLAN, fields, None)
    with pytest.raises(
        PlanError, match=r'the record field "tools" holds text that is no JSON list$'
    ):
        asked(PLAN, ["tools=add"], "hi")
    records = replace(PLAN, {"data.template": "{{ a }}{% generation %}{{ b }}{% endgeneration %}"})
    with pytest.raises(PlanError, match="the run answers records: give --record a=…"):
        asked(records, ["a=x"], "hi")
    assert asked(records, ["a=x"], None) == {"a": "x"}


def test_commands_are_answered_without_the_model(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talked(monkeypatch, "/help\n/\n/bye now\n/etc/fstab is empty\n/exit\nhi\n") == 0
    assert capsys.readouterr().err.count("commands: /forget begins anew, /exit ends\n") == 3
    (prompt,) = model.prompts
    assert "/etc/fstab is empty" in prompt
    assert "help" not in prompt


def test_a_chat_says_once_that_the_oldest_messages_are_forgotten(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = "the context of 256 tokens is full: the oldest messages are forgotten from here on"
    assert talked(monkeypatch, "hi\n" * 3) == 0
    assert full not in capsys.readouterr().err
    assert talked(monkeypatch, "hi\n" * 12) == 0
    assert capsys.readouterr().err.count(full) == 1
    last = model.prompts[-1].count("hi")
    assert 1 < last < 12


def test_a_line_that_is_not_utf8_is_answered(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8")
    monkeypatch.setattr(sys, "stdin", given)
    monkeypatch.setattr(sys, "argv", ["", "chat", "run"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert trainer_command.main() == 0
    assert capsys.readouterr().out == "hello\n"
    assert "caf\N{REPLACEMENT CHARACTER}" in model.prompts[0]
