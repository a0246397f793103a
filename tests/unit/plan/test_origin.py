"""Where weights come from is said, and random ones are refused where trained ones are expected."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.plan import catalog
from memconsole.plan.check import check_start
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.training.origin import origin, shortly
from memconsole_trainer.weights.tensorfile import TensorFile
from tests.unit.plan.no_tensors import NO_TENSORS

LORA = {"optimize.lora_rank": 8, "optimize.freeze_base": True}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "tie_word_embeddings": True,
}
PARAMETERS = 96 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32


TOKENIZERS = {
    "tokenizer.json": b'{"model": {"vocab": {"a": 0}}}',
    "vocab.json": b'{"a": 0}',
    "tokenizer.model": (
        Path(__file__).parents[2] / "data/sentencepiece/unigram.model"
    ).read_bytes(),
}


_HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
CUT = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(7)
"""Weights without their last byte."""
CONTENTS = {**TOKENIZERS, "model.safetensors": NO_TENSORS}


def model(folder: Path, *files: str) -> Path:
    """A model's directory with a configuration and these files: tokenizers, weights without tensors, and others that hold nothing."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in files:
        (folder / name).write_bytes(CONTENTS.get(name, b""))
    return folder


def plan(name: object, **changes: Any) -> Plan:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(Plan(), {"model.name": str(name), **settings})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `owner/tiny` in a hub cache, with a configuration alone."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--owner--tiny"
    snapshot = model(folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    return snapshot


def test_a_catalog_model_says_where_its_trained_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert origin(Plan()).words == shortly(Plan()) == "from scratch"
    named = "openai-community/gpt2"
    words = origin(plan("gpt2")).words
    assert words == f"from scratch; to fine-tune: hf download {named}, then model.name = {named}"


def test_a_directory_with_weights_names_them_and_its_tokenizer(tmp_path: Path) -> None:
    folder = model(tmp_path / "tiny", "model.safetensors", "tokenizer.model")
    found = origin(plan(folder))
    assert found.words == f"fine-tunes {folder} ({PARAMETERS:,} parameters, its tokenizer.model)"
    assert found.directory == str(folder)
    assert shortly(plan(folder)) == "fine-tunes"
    check_start(plan(folder, **{"optimize.lora_rank": 8, "optimize.freeze_base": True}))
    scratch = plan(folder, model__weights="random")
    assert origin(scratch).words == "from scratch: model.weights = random"
    assert (origin(scratch).directory, shortly(scratch)) == (None, "from scratch")


def test_weights_without_a_tokenizer_are_refused_unless_one_is_named(tmp_path: Path) -> None:
    folder = model(tmp_path / "tiny", "model.safetensors", "vocab.json")
    with pytest.raises(
        PlanError, match=r"no tokenizer: expected tokenizer\.json, tokenizer\.model"
    ):
        check_start(plan(folder))
    check_start(plan(folder, data__tokenizer="mine.json"))
    (folder / "merges.txt").touch()
    check_start(plan(folder))


def test_weights_in_another_format_are_not_called_no_weights(tmp_path: Path) -> None:
    folder = model(tmp_path / "tiny", "pytorch_model.bin")
    said = f"weights in another format than safetensors: {folder} holds pytorch_model.bin"
    assert origin(plan(folder)).words == said
    assert said.startswith(shortly(plan(folder)))
    lines = CliRunner().invoke(cli, ["plan", "--set", f"model.name={folder}"]).output.splitlines()
    at = lines.index(said)
    assert lines[at + 1].startswith(
        f"train refuses this plan: {folder} holds its weights as pytorch_model.bin"
    )
    assert shortly(plan(folder, model__weights="random")) == "from scratch"


def test_weights_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "tiny", "tokenizer.json")
    weights = folder / "model.safetensors"
    os.mkfifo(weights)
    with pytest.raises(PlanError) as refused:
        check_start(plan(folder))
    assert str(refused.value) == f"{weights}: cannot be read: a named pipe, not a file"
    said = CliRunner().invoke(cli, ["plan", "--set", f"model.name={folder}"]).output
    assert f"train refuses this plan: {refused.value}" in said
    check_start(plan(folder, model__weights="random"))
    weights.unlink()
    weights.mkdir()
    with pytest.raises(PlanError, match="cannot be read: a folder, not a file"):
        check_start(plan(folder))
    weights.rmdir()
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "gone.safetensors"}}'
    )
    with pytest.raises(PlanError, match=r"tiny: gone\.safetensors is missing"):
        check_start(plan(folder))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a safetensors file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n",
            "not a safetensors file",
        ),
        ((2).to_bytes(8, "little") + b"[]", "damaged safetensors header"),
        (CUT, "a does not lie inside the file (truncated?)"),
    ],
)
def test_damaged_weights_are_refused_before_a_launch_as_the_trainer_refuses_them(
    content: bytes, why: str, tmp_path: Path
) -> None:
    folder = model(tmp_path / "tiny", "model.safetensors", "tokenizer.json")
    check_start(plan(folder))
    weights = folder / "model.safetensors"
    weights.write_bytes(content)
    attempts: list[Callable[[], object]] = [
        lambda: check_start(plan(folder)),
        lambda: TensorFile(weights),
    ]
    for refused in attempts:
        with pytest.raises(ValueError, match="tiny") as error:
            refused()
        assert str(error.value) == f"{weights}: {why}"
    said = CliRunner().invoke(cli, ["plan", "--set", f"model.name={folder}"]).output
    assert f"train refuses this plan: {weights}: {why}" in said


def test_a_frozen_random_base_is_refused_unless_it_is_asked_for(tmp_path: Path) -> None:
    folder = model(tmp_path / "tiny")
    for name in ("stories", "gpt2", str(folder)):
        with pytest.raises(
            PlanError, match=r"lora_rank = 8: the frozen base would be random"
        ) as no:
            check_start(plan(name, **LORA))
        assert str(no.value).endswith("model.weights = random trains from random ones")
        check_start(plan(name, model__weights="random", **LORA))
        check_start(plan(name))
    frozen = {"model.name": "efficientids", "optimize.freeze_base": True}
    with pytest.raises(PlanError, match="freeze_base = true: the frozen base would be random"):
        check_start(replace(Plan(), frozen))


def test_a_hub_model_without_weights_is_not_trained_from_scratch_by_mistake(hub: Path) -> None:
    asked = plan("owner/tiny")
    assert origin(asked).words == "weights not here: hf download owner/tiny"
    assert shortly(asked) == "weights not here"
    with pytest.raises(PlanError, match="weights not here: hf download owner/tiny"):
        check_start(asked)
    check_start(replace(asked, {"model.weights": "random"}))
    (hub / "model.safetensors").write_bytes(NO_TENSORS)
    (hub / "tokenizer.json").write_bytes(TOKENIZERS["tokenizer.json"])
    check_start(asked)


def test_plan_and_its_json_say_it() -> None:
    said = CliRunner().invoke(cli, ["plan", "--set", "device.name=rtx-3060-12gb"]).output
    assert "\nfrom scratch\n" in said
    words = [
        "plan",
        "--json",
        "--set",
        "device.name=rtx-3060-12gb",
        "--set",
        "model.weights=random",
    ]
    told = json.loads(CliRunner().invoke(cli, words).output)
    assert (told["weights"], told["refused"]) == ("from scratch", None)
    assert "train refuses" not in said
    frozen = ["plan", "--set", "device.name=rtx-3060-12gb", "--set", "optimize.lora_rank=8"]
    lines = CliRunner().invoke(cli, frozen).output.splitlines()
    assert any(line.startswith("total") for line in lines), "it is priced all the same"
    told = json.loads(CliRunner().invoke(cli, [*frozen, "--json"]).output)["refused"]
    assert told in lines[2]
    assert lines[1] == "from scratch"
    assert lines[2].startswith("train refuses this plan: optimize.lora_rank = 8: the frozen base")
    unknown = CliRunner().invoke(cli, ["plan", "--set", "model.weights=best"])
    assert 'model.weights = "best": expected random' in str(unknown.exception)


def test_another_decoder_or_model_has_its_own_weights() -> None:
    preset = catalog.preset("efficientids")
    assert preset.model.weights == "random"
    assert replace(preset, {"model.decoder": "elsewhere"}).model.weights is None
    assert replace(preset, {"model.name": "gpt2"}).model.weights is None
    kept = {"model.decoder": preset.model.decoder, "model.items": 11}
    assert replace(preset, kept).model.weights == "random"
    named = {"model.decoder": "elsewhere", "model.weights": "random"}
    assert replace(preset, named).model.weights == "random"
