"""BitNet export: the codes are what is documented, and the losses told are those of the weights in the files."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from memconsole.cli.main import cli
from memconsole.plan.models.architecture import parameters
from memconsole.plan.tasks.language import MASKED
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_torch.models.decoder import Decoder
from memconsole_torch.models.pretrained import load
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text.opened import open_text
from memconsole_trainer.data.text.prepared import held_out
from memconsole_trainer.engine import WeightsError
from memconsole_trainer.randomness import generator
from memconsole_trainer.weights import bitnet, trained
from memconsole_trainer.weights.export import export
from memconsole_trainer.weights.huggingface_names import stored_as
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness.runs import attempt, plan, told
from tests.training.harness.tiny_models import ARCHITECTURES

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@settings(deadline=None)
@given(st.integers(1, 19), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_what_is_packed_comes_back_whatever_the_rows(rows: int, columns: int, seed: int) -> None:
    from transformers.integrations import bitnet as theirs  # slow: it imports torch's compiler

    codes = np.random.default_rng(seed).integers(-1, 2, (rows, columns)).astype(np.int8)
    packed = bitnet.pack(codes)
    assert packed.shape == (-(-rows // 4), columns)
    np.testing.assert_array_equal(bitnet.unpack(packed, rows), codes)
    if rows % 4 == 0:
        expected = theirs.pack_weights(torch.from_numpy(codes.copy())).numpy()
        np.testing.assert_array_equal(packed, expected)


def test_codes_are_the_papers() -> None:
    matrix = np.array([[0.0, 0.3, -0.31, 2.0], [-2.0, 0.29, 0.0, -0.1]], np.float32)
    codes, scale = bitnet.ternary(matrix)
    assert scale == pytest.approx(5.0 / 8)  # half of it is the border between 0 and 1
    assert codes.tolist() == [[0, 0, 0, 1], [-1, 0, 0, 0]]
    assert bitnet.ternary(np.zeros((2, 2), np.float32))[0].tolist() == [[0, 0], [0, 0]]


class Lively:
    """Weights none of which is plain zero or one."""

    def __init__(self, kind: str) -> None:
        self._start = InitialWeights(ARCHITECTURES[kind], 1)

    def tensor(self, name: str) -> np.ndarray:
        array = self._start.tensor(name)
        return array + 0.1 * generator(2, name).standard_normal(array.shape, dtype=np.float32)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama-untied", "gemma3"])
def test_an_export_holds_codes_for_matrices_alone_and_reads_back_as_they_say(
    kind: str, tmp_path: Path
) -> None:
    architecture, weights = ARCHITECTURES[kind], Lively(kind)
    packing = bitnet.Packing(architecture)
    out = tmp_path / "out"
    export(architecture, weights, out, change=packing, more=bitnet.config(architecture))
    files = load_file(out / "model.safetensors")
    matrices = [p for p in parameters(architecture) if p.role == "matrix"]
    assert packing.codes == sum(p.size for p in matrices)
    config = json.loads((out / "config.json").read_text())
    # transformers would multiply biases by a matrix's scale
    assert ("quantization_config" in config) == (kind in ("llama-untied", "gemma3"))
    read = bitnet.BitNetWeights(out, architecture)
    scales: dict[str, set[float]] = {}
    for p in parameters(architecture):
        found, original = read.tensor(p.name), weights.tensor(p.name)
        place = stored_as(p, architecture)
        if p.role != "matrix":
            if place is not None:
                np.testing.assert_array_equal(found, original, err_msg=p.name)
            continue
        assert place is not None
        assert files[place.name].dtype == np.uint8
        scale = float(files[place.name + bitnet.SCALE][0])
        scales.setdefault(place.name, set()).add(scale)
        expected = np.clip(np.round(original.astype(np.float64) / scale), -1, 1) * scale
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=p.name)
        if place.parts == 1:
            assert scale == pytest.approx(np.abs(original.astype(np.float64)).mean(), rel=1e-6)
    plain = tmp_path / "plain"
    export(architecture, weights, plain)
    with pytest.raises(WeightsError, match="not stored in codes"):
        bitnet.BitNetWeights(plain, architecture).tensor(matrices[0].name)


def loss_of(run: Any, weights: Any) -> float:
    """Mean nats per held-out token, in plain torch operations."""
    found = trained.read(run.path)
    opened = open_text(found.plan, found.architecture.vocab_size)
    rows = held_out(found.plan, found.architecture, opened, found.tokenizer())
    make = partial(Decoder, found.architecture)
    decoder = load(found.architecture, make, weights, torch.device("cpu"))
    nats = tokens = 0.0
    with torch.no_grad():
        for batch in rows.batches(BatchShape(1, 1, found.plan.data.sequence_length), 0):
            logits = decoder.logits(torch.from_numpy(batch["inputs"][0]))
            targets = torch.from_numpy(batch["targets"][0]).long()
            nats += float(
                F.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=MASKED, reduction="sum"
                )
            )
            tokens += int((targets != MASKED).sum())
    return nats / tokens


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("torch", {"train__ema_decay": 0.5, "train__evaluation_batch_size": 3}),
        (
            "jax",
            {"model__weights": "random", "optimize__lora_rank": 4, "optimize__freeze_base": True},
        ),
    ],
    ids=["torch averaged", "jax adapted"],
)
def test_the_losses_told_are_those_of_the_weights_before_and_in_the_files(
    backend: str, changes: dict[str, Any], text: Path, tmp_path: Path, capfd: Any
) -> None:
    run = create_run(plan(text, backend, train__max_steps=12, **changes))
    assert attempt(run) == 0
    capfd.readouterr()
    out = tmp_path / "ternary"
    done = CliRunner().invoke(cli, ["export", run.id, str(out), "--format", "bitnet"])
    said = capfd.readouterr()
    assert done.exit_code == 0, said.err
    document = json.loads((out / "bitnet.json").read_text())
    measured = document["validation"]
    before, after = measured["before"], measured["after"]
    evaluation = told(run, events.Evaluation)[-1]
    assert before["loss"] == pytest.approx(evaluation.loss, rel=1e-4)
    assert before["bits_per_byte"] == pytest.approx(evaluation.bits_per_byte, rel=1e-4)
    found = trained.read(run.path)
    assert before["loss"] == pytest.approx(loss_of(run, found), rel=1e-4)
    ternary = bitnet.BitNetWeights(out, found.architecture)
    assert after["loss"] == pytest.approx(loss_of(run, ternary), rel=1e-4)
    assert abs(after["loss"] - before["loss"]) > 1e-4
    assert after["perplexity"] == pytest.approx(math.exp(after["loss"]))
    assert f"after: validation loss {after['loss']:.4f}" in done.output
    assert document["bytes"] < document["fp32_bytes"]
    assert 0 < document["zero_share"] < 1


def test_an_export_of_a_run_on_preferences_has_no_loss_of_texts(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"Where is {n}? ", "chosen": "Here it is.", "rejected": "No."} for n in range(40)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"train__objective": "dpo", "data__template": "prompt", "model__weights": "random"}
    run = create_run(plan(pairs, train__max_steps=1, **changes))
    assert attempt(run) == 0
    done = CliRunner().invoke(cli, ["export", run.id, str(tmp_path / "out"), "--format", "bitnet"])
    assert done.exit_code == 0
    assert "not measured: the run learned preferences" in done.output


def test_an_export_of_changed_data_says_that_its_loss_was_not_measured(
    text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for path in text.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    run = create_run(plan(folder, train__max_steps=2))
    assert attempt(run) == 0
    next(folder.iterdir()).write_text("another text " * 50)
    done = CliRunner().invoke(cli, ["export", run.id, str(tmp_path / "out"), "--format", "bitnet"])
    assert done.exit_code == 0
    assert "not measured" in done.output
    assert json.loads((tmp_path / "out" / "bitnet.json").read_text())["validation"] is None
