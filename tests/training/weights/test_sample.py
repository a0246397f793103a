"""`memconsole sample` and the options that it shares: where a prompt comes from, what is said of it, and the device."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.cli.runs import program
from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.run_store import create_run
from memconsole_trainer import chat, sample
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, train
from memconsole_trainer.engine import OnTokens, Sampling
from memconsole_trainer.weights import trained
from tests.training.harness.runs import attempt, final, plan

CHATS = replace(Plan(), {"data.template": "chatml"})
FULL = "the context of 64 tokens is full\n"
UNUSED = "not used, because answers take the likeliest token; --temperature 0.8 draws them"


class Model:
    """Says one word until it has as many tokens as it may, or `says` of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.word = tokenizer.prompt("hello")[-1]
        self.tokenizer = tokenizer
        self.says = 1000
        self.prompts: list[str] = []

    def generate(
        self, prompt: Sequence[int], tokens: int, sampling: Sampling, on_tokens: OnTokens | None
    ) -> list[int]:
        self.prompts.append(self.tokenizer.decode(prompt))
        return [self.word] * min(tokens, self.says)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    tokenizer = train(["hello there"] * 9, 300, tags=["<|im_start|>", "<|im_end|>"])
    model = Model(tokenizer)
    found = SimpleNamespace(
        plan=CHATS,
        checkpoint=SimpleNamespace(step=1200),
        note="",
        architecture=SimpleNamespace(max_positions=64),
    )
    monkeypatch.setattr(trained, "read", lambda *_: found)
    monkeypatch.setattr(sample, "ready", lambda _: (tokenizer, model))
    monkeypatch.setattr(chat, "ready", lambda _: (tokenizer, model))
    return model


def sampled(
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
    typed: bytes = b"",
    command: Callable[[], int] = sample.main,
) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    monkeypatch.setattr(sys, "argv", ["", "run", *options])
    return command()


def test_a_hyphen_reads_the_prompt_or_the_message_from_standard_input(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "hello\n\nthere \u2603\n".encode()
    assert sampled(monkeypatch, "--prompt=-", "--tokens=1", typed=typed) == 0
    assert capsys.readouterr().out.startswith("hello\n\nthere \u2603hello")
    assert sampled(monkeypatch, "--message=-", "--tokens=1", typed=b"hello \xff\n") == 0
    assert "hello \ufffd<|im_end|>" in model.prompts[1]


def test_a_context_that_is_full_is_said_if_more_was_wanted(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in ("--prompt=hello", "--message=hello"):
        assert sampled(monkeypatch, asked, "--tokens=500") == 0
        assert capsys.readouterr().err == FULL
        assert sampled(monkeypatch, asked, "--tokens=3") == 0
        assert capsys.readouterr().err == ""
    assert sampled(monkeypatch, command=chat.main, typed=b"hello\n") == 0
    assert capsys.readouterr().err.endswith(FULL)
    model.says = 5
    assert sampled(monkeypatch, "--prompt=hello", "--tokens=500") == 0
    assert capsys.readouterr().err == ""


def test_options_that_draw_are_said_to_be_unused_where_the_likeliest_token_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = create_run(CHATS).id
    printed = [sys.executable, "-c", "import sys; print(*sys.argv[1:])"]
    monkeypatch.setattr(program, "program", lambda _, __, arguments: [*printed, *arguments])

    def said(*words: str) -> str:
        done = CliRunner().invoke(cli, [words[0], run, *words[1:]])
        assert done.exit_code == 0
        return done.stderr

    answer = ("sample", "--message", "hi")
    assert said(*answer, "--seed", "3", "--top-p", "0.5") == f"--seed, --top-p: {UNUSED}\n"
    assert said("sample", "--record", "a=b", "--top-k", "5") == f"--top-k: {UNUSED}\n"
    assert said("chat", "--seed", "3") == f"--seed: {UNUSED}\n"
    assert said(*answer) == said("chat") == ""
    assert said(*answer, "--seed", "3", "--temperature", "0") == ""
    assert said("sample", "--prompt", "hi", "--seed", "3") == ""


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_run_is_used_without_the_card_it_was_trained_on(
    backend: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(backend)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    short = {"train__max_steps": 1, "train__preflight": False, "train__sample_tokens": 0}
    run = create_run(plan(text, backend, **short))
    assert attempt(run) == 0, final(run)
    on_card = {"device.name": "cuda:63", "optimize.compile": True}
    run.write_plan(replace(run.read_plan(), on_card))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["", str(run.path), "--tokens=2"])
    if backend == "torch":  # JAX would look for the card in this process
        assert sample.main() == 2
        assert "--device cpu computes on the CPU" in capsys.readouterr().err
    sys.argv.append("--device=cpu")
    assert sample.main() == 0
