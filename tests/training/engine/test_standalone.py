"""The program of an exported recommender computes with every decoder what the trainer computes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from memconsole_trainer.predictions.export import rotation_of
from memconsole_trainer.predictions.standalone.recommendation import Recommender
from tests.training.engine.test_recommender import MODEL, Weights, at_every_position, existing
from tests.training.harness import torch_comparison as comparison
from tests.training.harness.tiny_models import ARCHITECTURES


@pytest.mark.parametrize("family", [name for name, a in ARCHITECTURES.items() if not a.experts])
def test_scores_are_those_of_the_trainer(family: str, tmp_path: Path) -> None:
    decoder = msgspec.structs.replace(ARCHITECTURES[family], layers=3)
    model = msgspec.structs.replace(MODEL, decoder=decoder)
    weights = Weights(model, 1)
    save_file(
        {p.name: weights.tensor(p.name) for p in model.parameters()},
        tmp_path / "model.safetensors",
    )
    config = {**msgspec.to_builtins(model), "rotation": rotation_of(decoder, 40)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "items.json").write_text(json.dumps([None, *map(str, range(1, model.rows))]))
    items = np.random.default_rng(0).integers(1, model.rows, (2, 40), np.int32)
    made = Recommender(tmp_path)
    expected = at_every_position("torch", model, weights, items)
    found = made.scores(torch.from_numpy(items)).numpy()
    np.testing.assert_allclose(existing(found), existing(expected), atol=1e-4)
    made.ids[2] = None  # places without an item of the data have no probability
    fewer = msgspec.structs.replace(model, absent=(2,))
    expected = comparison.outputs(fewer, weights, {"items": items})
    found = made.scores(torch.from_numpy(items))[:, -1].numpy()
    np.testing.assert_allclose(np.exp(found), np.exp(expected), atol=1e-5)
