"""What a run exports continues a text in transformers as `memconsole sample` does, and stops there."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.templates.chat import Message
from memconsole.plan.templates.choice import template_of
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.chat import forget
from memconsole_trainer.chat import main as chat
from memconsole_trainer.data.sources.records import Record
from memconsole_trainer.data.text.tokens import tokenizer as tokenizers
from memconsole_trainer.export import main as export
from memconsole_trainer.sample import main as sample
from memconsole_trainer.tasks.answering import Answerer
from memconsole_trainer.weights import export as weights_export
from memconsole_trainer.weights.export_run import export_adapters, source_dtype
from memconsole_trainer.weights.initialize import InitialWeights
from memconsole_trainer.weights.trained import read
from tests.training.harness import round_trip
from tests.training.harness.runs import TINY, attempt, final

pytest.importorskip("torch")
tiny_models = pytest.importorskip("tests.training.harness.tiny_models")

INTERPRETERS = ["", *filter(None, os.environ.get("MEMCONSOLE_TRANSFORMERS", "").split(os.pathsep))]
"""Pythons with other versions of transformers, separated by `:`; the first is this one."""
ROUND_TRIP = Path(__file__).parents[1] / "harness" / "round_trip.py"
PIECES = Path(__file__).parents[2] / "data" / "sentencepiece"
ANSWERS = {
    "hello": "hi there",
    "how are you": "I am fine",
    "bye": "see you soon",
    "one": "two three",
}
TOKENS, SAMPLED = 24, 2
CHATS: dict[str, Any] = {
    **TINY,
    "model.target_params": None,
    "data.vocab_size": None,
    "data.sequence_length": 64,
    "data.template": "chatml",
    "data.loss_on": "answers",
    "data.validation_fraction": 0.05,
    "train.epochs": 1,
    "train.max_steps": 40,
    "train.warmup_steps": 5,
    "train.learning_rate": 1e-2,
    "train.answered_records": 0,
    "train.sample_tokens": 0,
    "train.preflight": False,
    "optimize.accumulation_steps": 1,
}


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def chats(path: Path) -> Path:
    rows = [{"prompt": q, "completion": a} for q, a in ANSWERS.items()] * 20
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(settings: dict[str, Any]) -> RunDirectory:
    run = create_run(replace(Plan(), settings))
    assert attempt(run) == 0, final(run)
    return run


def spoken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object
) -> str:
    """What a command prints."""
    monkeypatch.setattr(sys, "argv", ["", *map(str, words)])
    assert (export if words[0] == "export" else sample)() == 0
    return capsys.readouterr().out.rstrip("\n")


def exported(run: RunDirectory, out: Path, monkeypatch: pytest.MonkeyPatch, *form: str) -> Path:
    monkeypatch.setattr(sys, "argv", ["", str(run.path), str(out), *form])
    assert export() == 0
    return out


def said(python: str, **asked: Any) -> dict[str, Any]:
    """What transformers of an interpreter generates."""
    asked = {"prompts": [], "chats": [], "tokens": TOKENS, **asked}
    if not python:
        return round_trip.said(asked)
    done = subprocess.run(
        [python, str(ROUND_TRIP)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def as_messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def compared(
    run: RunDirectory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    learned: bool = True,
    **asked: Any,
) -> None:
    """Both answer alike and continue a text alike; with `learned`, rightly, and they end."""
    capsys.readouterr()
    options = ("--temperature", "0", "--tokens", TOKENS)
    questions = list(ANSWERS)
    own = [spoken(capsys, monkeypatch, run.path, "--message", q, *options) for q in questions[:SAMPLED]]  # fmt: skip
    prompt = "hello how"
    text = spoken(capsys, monkeypatch, run.path, "--prompt", prompt, *options)
    for python in INTERPRETERS:
        found = said(python, prompts=[prompt], chats=[as_messages(q) for q in questions], **asked)
        answers = [answer for answer, _ in found["answers"]]
        assert answers[:SAMPLED] == own, found["version"]
        assert found["texts"][0][0].rstrip() == text.rstrip(), found["version"]
        if learned:
            assert answers == list(ANSWERS.values()), found["version"]
            assert all(ended for _, ended in found["answers"]), found["version"]


def source(kind: str, folder: Path, dtype: str) -> Architecture:
    """A directory as transformers writes it: random weights of a family, and its kind of tokenizer."""
    families = {"llama": "bpe", "mistral": "bpe", "gemma": "gemma", "gemma2": "gemma", "gemma3": "gemma"}  # fmt: skip
    pieces = families.get(kind)
    architecture = msgspec.structs.replace(
        tiny_models.ARCHITECTURES[kind], vocab_size=448, initializer_range=0.05
    )
    if kind in ("mistral", "mistral-yarn", "starcoder2"):
        # No layer sees everything: three windows of 8 reach from the answer to the question, and three of 5 do not.
        architecture = msgspec.structs.replace(architecture, sliding_window=8)
    weights_export.export(architecture, InitialWeights(architecture, 5), folder, dtype)
    if pieces is None:
        made = tokenizers.train(
            [*ANSWERS, *ANSWERS.values()] * 9, 320, tags=["<|im_start|>", "<|im_end|>"]
        )
        made.save(folder / "tokenizer.json")
        return architecture
    shutil.copy(PIECES / f"{pieces}.model", folder / "tokenizer.model")
    added = {
        str(420 + i): {"content": word, "special": True}
        for i, word in enumerate(("<|im_start|>", "<|im_end|>"))
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "add_bos_token": True,
                "added_tokens_decoder": added,
            }
        )
    )
    return architecture


def test_a_model_trained_from_scratch_answers_the_same_in_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = chats(tmp_path / "chats.jsonl")
    run = trained(
        {**CHATS, "model.target_params": 100_000, "data.vocab_size": 300, "data.source": str(data)}
    )
    out = exported(run, tmp_path / "out", monkeypatch)
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    compared(run, capsys, monkeypatch, directory=str(out))
    words = "hello\n\nbye\n/forget\none\n/exit\nhello\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    monkeypatch.setattr(sys, "argv", ["", str(run.path), "--temperature=0", "--tokens=24"])
    assert chat() == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert (first, third) == (ANSWERS["hello"], ANSWERS["one"])
    assert second
    old: list[Message] = [
        {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "o"))
    ]
    asked: Message = {"role": "user", "content": "one"}
    found = read(run.path)
    template, tokenizer = template_of(found.plan), found.tokenizer()
    assert template is not None
    for long in range(40):
        said = [*old * long, asked]
        answerer = Answerer(template, tokenizer, 16, 200)
        forget(answerer, Record("the chat", {"messages": said}), 0)
        assert said[-1] == asked
        assert answerer.room(Record("the chat", {"messages": said})) == 16
    assert len(said) < 41
    assert said[:2] == old  # no more is forgotten than is needed
    adapted = {"optimize.lora_rank": 4, "optimize.freeze_base": True, "model.weights": "random"}
    alone = dataclasses.replace(found, plan=replace(found.plan, adapted))
    with pytest.raises(PlanError, match="belong to weights that no directory holds"):
        export_adapters(alone, tmp_path / "adapters")
    seeing = tmp_path / "seeing"
    seeing.mkdir()
    text = {"model_type": "qwen3_vl_text", "dtype": "bfloat16"}
    (seeing / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text}))
    adapted |= {"model.name": str(seeing), "model.weights": None}
    on_images = dataclasses.replace(found, plan=replace(found.plan, adapted))
    with pytest.raises(PlanError, match="the base also sees images"):
        export_adapters(on_images, tmp_path / "adapters")
    assert source_dtype(on_images) == "bfloat16"
    assert not (tmp_path / "adapters").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(tiny_models.ARCHITECTURES))
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_fine_tuned_directory_of_every_family_answers_the_same_in_transformers(
    kind: str,
    backend: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "source"
    source(kind, folder, "float32")
    data = chats(tmp_path / "chats.jsonl")
    longer = {"backend": backend, "train.max_steps": 250, "train.learning_rate": 4e-3}
    run = trained({**CHATS, **longer, "model.name": str(folder), "data.source": str(data)})
    out = exported(run, tmp_path / "out", monkeypatch)
    compared(run, capsys, monkeypatch, directory=str(out))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["gpt2", "gpt_neox", "llama", "phi3", "gemma2", "gemma3", "glm4", "ernie4_5", "starcoder2"],
)
def test_adapters_answer_the_same_through_peft_and_merged(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "source"
    source(kind, folder, "float32")
    data = chats(tmp_path / "chats.jsonl")
    adapted = {
        "optimize.lora_rank": 16,
        "optimize.freeze_base": True,
        "train.learning_rate": 3e-2,
    }
    run = trained({**CHATS, **adapted, "model.name": str(folder), "data.source": str(data)})
    merged = exported(run, tmp_path / "merged", monkeypatch)
    compared(run, capsys, monkeypatch, learned=False, directory=str(merged))
    adapters = exported(run, tmp_path / "adapters", monkeypatch, "peft")
    pythons = [p for p in INTERPRETERS[1:] if subprocess.run([p, "-c", "import peft"], check=False).returncode == 0]  # fmt: skip
    if not pythons:
        pytest.skip("no interpreter has peft")
    monkeypatch.setattr(sys.modules[__name__], "INTERPRETERS", pythons)
    compared(run, capsys, monkeypatch, learned=False, directory=str(adapters), base=str(folder))


def test_an_export_keeps_the_type_of_the_weights_it_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.numpy import load_file

    folder = tmp_path / "source"
    source("llama", folder, "bfloat16")
    data = chats(tmp_path / "chats.jsonl")
    run = trained(
        {**CHATS, "train.max_steps": 1, "model.name": str(folder), "data.source": str(data)}
    )
    for words, dtype in (((), "bfloat16"), (("--dtype=float16",), "float16")):
        out = exported(run, tmp_path / dtype, monkeypatch, *words)
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        found = load_file(out / "model.safetensors")
        assert {array.dtype.name for array in found.values()} == {dtype}
