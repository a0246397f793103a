"""A text is shown while a model writes it, and an interrupt ends the text alone."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from memconsole.plan.plan import Plan, replace
from memconsole_trainer import chat, sample
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, train
from memconsole_trainer.engine import GREEDY, OnTokens, Sampling
from memconsole_trainer.text_streamer import TextStreamer, settled


class Writer:
    """Draws the tokens of a text, and an interrupt comes after some of them."""

    def __init__(self, tokenizer: Tokenizer, text: str, drawn: int | None = None) -> None:
        self.tokenizer, self.drawn = tokenizer, drawn
        self.ids = tokenizer.prompt(text)
        self.prompts: list[str] = []

    def generate(
        self,
        prompt: Sequence[int],
        tokens: int,
        sampling: Sampling = GREEDY,
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        self.prompts.append(self.tokenizer.decode(prompt))
        for number, token in enumerate(self.ids):
            if number == self.drawn:
                signal.raise_signal(signal.SIGINT)
            if on_tokens is not None:
                on_tokens([token])
        return self.ids


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(["hello there"] * 9, 300, tags=["<|im_start|>", "<|im_end|>"])


class Terminal(io.StringIO):
    """Keeps what is written, one entry for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.parts += [text] if text else []
        return super().write(text)


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard output from now on."""
    made = Terminal()
    monkeypatch.setattr(sys, "stdout", made)
    return made


def streamer(tokenizer: Tokenizer, text: str, drawn: int | None = None) -> TextStreamer:
    clock = iter(range(10_000))
    return TextStreamer(
        Writer(tokenizer, text, drawn),  # type: ignore[arg-type]
        lambda prompt, new: "The " + tokenizer.continuation(prompt, new),
        clock=lambda: float(next(clock)),
    )


def test_whole_characters_are_shown_as_they_come(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = terminal(monkeypatch)
    shown = streamer(tokenizer, "a €\n\nb ")
    new = shown.generate([1], 64)
    assert output.parts == ["The", " a", " €", "\n\nb"]
    shown.end("The " + tokenizer.continuation([1], new))
    assert output.getvalue() == "The a €\n\nb \n"
    assert shown.code == 0


def test_what_would_act_on_a_terminal_is_not_shown(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = terminal(monkeypatch)
    shown = streamer(tokenizer, "a\x1b[31mb")
    new = shown.generate([1], 64)
    shown.end("The " + tokenizer.continuation([1], new))
    assert "\x1b" not in output.getvalue()
    assert output.getvalue().endswith("\nThe ab\n")


def test_an_interrupt_keeps_what_was_drawn(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = terminal(monkeypatch)
    before = signal.getsignal(signal.SIGINT)
    shown = streamer(tokenizer, "ab€c", drawn=4)
    new = shown.generate([1], 64)
    assert len(new) == 4
    shown.end("The " + tokenizer.continuation([1], new))
    assert output.getvalue() == "The ab\n"
    assert shown.code == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_terminal_the_whole_text_is_printed_at_the_end(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = streamer(tokenizer, "ab")
    shown.generate([1], 64)
    assert capsys.readouterr().out == ""
    shown.end("The ab ")
    assert capsys.readouterr().out == "The ab \n"
    with pytest.raises(KeyboardInterrupt):
        streamer(tokenizer, "ab", drawn=1).generate([1], 64)


def test_what_may_begin_the_end_of_a_text_waits() -> None:
    assert settled("I ring.\n\nUs", "User:") == "I ring."
    assert settled("I ring. So", "User:") == "I ring. So"
    assert settled("at 5 \ufffd\ufffd") == "at 5"


def test_an_interrupted_answer_stays_in_the_chat(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = terminal(monkeypatch)
    writer = Writer(tokenizer, "xyz", drawn=2)
    found = SimpleNamespace(
        plan=replace(Plan(), {"data.template": "chatml"}),
        checkpoint=SimpleNamespace(step=1200),
        note="",
        architecture=SimpleNamespace(max_positions=256),
    )
    monkeypatch.setattr(chat.trained, "read", lambda *_: found)
    monkeypatch.setattr(chat, "ready", lambda _: (tokenizer, writer))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nyou\n"))
    monkeypatch.setattr(sys, "argv", ["", "run"])
    assert chat.main() == 0
    assert output.getvalue() == "xy\nxy\n"
    assert "assistant\nxy<|im_end|>\n" in writer.prompts[1]


def test_a_sampled_message_that_is_interrupted_ends_with_130(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = terminal(monkeypatch)
    plan = replace(Plan(), {"data.template": "chatml"})
    found = SimpleNamespace(plan=plan, architecture=SimpleNamespace(max_positions=256))
    options = SimpleNamespace(tokens=None, temperature=None, top_k=0, seed=0, top_p=1.0)
    record = {"messages": [{"role": "user", "content": "hi"}]}
    writer: Any = Writer(tokenizer, "xyz", drawn=2)
    code = sample.answer(found, writer, tokenizer, record, options)  # type: ignore[arg-type]
    assert (code, output.getvalue()) == (130, "xy\n")
