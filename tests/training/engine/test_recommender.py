"""The recommender in both engines: the definition, transformers' decoders, frozen and stored bodies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from memconsole.plan import catalog
from memconsole.plan.models import recommender
from memconsole.plan.models.recommender import Recommender, is_of_decoder
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks import RECOMMENDATION
from memconsole_jax import engine as jax_engine
from memconsole_torch import engine as torch_engine
from memconsole_torch.techniques.activations import two_level
from memconsole_trainer.data.ratings.baselines import ranked
from memconsole_trainer.engine import Batch, Engine
from memconsole_trainer.techniques import base_storage
from memconsole_trainer.weights.initialize import InitialWeights
from memconsole_trainer.weights.trained import starting_weights
from tests.training.harness import jax_comparison, torch_comparison
from tests.training.harness.tiny_models import ARCHITECTURES, save

torch.set_num_threads(1)

BACKENDS = ("torch", "jax")
LENGTH, ROWS = 8, 3
MODEL = Recommender(
    decoder=msgspec.structs.replace(ARCHITECTURES["gemma"], layers=2),
    items=11,
    clusters=3,
    embedding_size=8,
    adapter_size=12,
)
CREATE: dict[str, Callable[[Plan, None], Engine]] = {
    "torch": torch_engine.create,
    "jax": jax_engine.create,
}
COMPARISON: dict[str, Any] = {"torch": torch_comparison, "jax": jax_comparison}


def plan(backend: str, **settings: Any) -> Plan:
    return replace(
        catalog.preset("efficientids"),
        {
            "backend": backend,
            "device.name": "cpu",
            "data.sequence_length": LENGTH,
            "train.batch_size": ROWS,
            "train.warmup_steps": 0,
            "train.learning_rate": 1e-2,
            "optimize.freeze_base": True,
            **{key.replace("__", "."): value for key, value in settings.items()},
        },
    )


def built(backend: str, weights: Any = None, **settings: Any) -> Engine:
    made = plan(backend, **settings)
    engine = CREATE[backend](made, None)
    engine.build(made, MODEL, 100, weights or InitialWeights(MODEL, 0))
    return engine


def batch(micro_batches: int = 1, rows: int = ROWS, seed: int = 0) -> Batch:
    """Random items; a third of the targets is padding."""
    draw = np.random.default_rng(seed)
    shape = (micro_batches, rows, LENGTH)
    items = draw.integers(1, 12, shape, dtype=np.int32)
    targets = draw.integers(1, 12, shape, dtype=np.int32)
    targets[draw.random(shape) < 1 / 3] = 0
    return Batch({"items": items, "targets": targets}, float((targets > 0).sum()))


class Weights:
    """A `WeightSource`: random in every tensor, norms and biases included."""

    def __init__(self, model: Recommender, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.tensors = {
            p.name: (p.fill + 0.3 * draw.normal(size=p.shape)).astype(np.float32)
            for p in model.parameters()
        }

    def tensor(self, name: str) -> Any:
        return self.tensors[name]


def state(engine: Engine) -> dict[str, Any]:
    return {name: np.array(tensor) for name, tensor in engine.state()}


def at_every_position(backend: str, model: Recommender, weights: Any, items: Any) -> Any:
    """log P of every item after each position of `items` (B, T): each is the last of a row of its own."""
    rows, length = items.shape
    begun = np.where(np.tri(length, dtype=bool), items[:, None], 0).astype(np.int32)
    found = COMPARISON[backend].outputs(model, weights, {"items": begun.reshape(-1, length)})
    return found.reshape(rows, length, -1)


def existing(scores: Any) -> Any:
    """The columns that hold an item: clusters of 4, 4 and 3."""
    return scores[..., :11]


def projected(weights: Any, rows: Any) -> Any:
    """The adapter in float64."""
    for name in ("up", "down"):
        matrix = weights.tensor(f"adapter.{name}.weight").astype(np.float64)
        x = rows @ matrix.T + weights.tensor(f"adapter.{name}.bias")
        rows = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return rows


def defined(weights: Any, hidden: Any) -> Any:
    """log P(cluster) + log P(item | cluster) of every item, one by one, in float64."""
    members = projected(weights, weights.tensor("items.weight")[1:].astype(np.float64))
    clusters = projected(weights, weights.tensor("clusters.weight").astype(np.float64))
    of_cluster = hidden @ clusters.T
    found = []
    for item in range(11):
        own = [other for other in range(11) if other // 4 == item // 4]
        scores = hidden @ members[own].T
        total = np.log(np.exp(scores).sum(-1)) + np.log(np.exp(of_cluster).sum(-1))
        found.append(of_cluster[..., item // 4] + hidden @ members[item] - total)
    return np.stack(found, axis=-1)


@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_scores_are_those_of_transformers_decoder_and_the_definition(
    family: str, tmp_path: Path
) -> None:
    """The body comes from a directory that transformers wrote, and its hidden states from transformers itself."""
    oracle = save(family, tmp_path)
    made = plan("torch", model__decoder=str(tmp_path), model__items=11, model__clusters=3)
    model = catalog.model(made)
    assert isinstance(model, Recommender)
    weights = starting_weights(made, model)
    rows = dict(next(batch().micro_batches()))
    table = projected(weights, weights.tensor("items.weight").astype(np.float64))
    x = table[rows["items"]] * (32**0.5 if family == "gemma" else 1.0)
    with torch.no_grad():
        hidden = oracle.model(inputs_embeds=torch.from_numpy(x).float()).last_hidden_state
    expected = defined(weights, hidden.double().numpy())
    np.testing.assert_allclose(np.exp(expected).sum(-1), 1.0)
    for backend in BACKENDS:
        found = existing(at_every_position(backend, model, weights, rows["items"]))
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_both_backends_give_the_same_gradients_and_the_loss_of_the_definition() -> None:
    weights, rows = Weights(MODEL, 1), batch(micro_batches=2)
    gradients = torch_comparison.gradients(MODEL, weights, rows)
    others = jax_comparison.gradients(MODEL, weights, rows)
    assert gradients.keys() == others.keys() == {p.name for p in MODEL.parameters()}
    for name, gradient in gradients.items():
        assert np.abs(gradient - others[name]).max() <= 1e-5, name
        assert np.abs(gradient).max() > 0, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_is_not_the_decoder_learns_through_the_frozen_blocks(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are those that the table and the adapter have when all is trained, also in chunks of few
    positions; the state holds nothing of the decoder."""
    weights, rows = Weights(MODEL, 1), batch()
    gradients = torch_comparison.gradients(MODEL, weights, rows)
    own = [p.name for p in MODEL.parameters() if not is_of_decoder(p)]
    norm = float(np.sqrt(sum((gradients[name] ** 2).sum() for name in own)))
    monkeypatch.setattr(recommender, "CHUNK_BYTES", 4 * 32 * 4 * 5)
    assert MODEL.chunk_positions == 5
    engine = built(backend, weights, optimize__gradient_checkpointing="full")
    scores = existing(at_every_position("torch", MODEL, weights, rows["items"][0]))
    total = engine.evaluate([rows])
    engine.train_step(rows)
    (metrics,) = engine.take_metrics()
    assert metrics.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert metrics.loss == pytest.approx(total.mean, rel=1e-6)
    assert engine.trainable_parameters == sum(gradients[name].size for name in own)
    stored = [name.removeprefix("model.") for name in state(engine) if name.startswith("model.")]
    assert stored == own
    # The measures of the evaluation, from the scores of all items.
    counts = rows["targets"][0] > 0
    targets = rows["targets"][0][counts] - 1
    picked = np.take_along_axis(scores[counts], targets[:, None], axis=1)
    assert total.mean == pytest.approx(-picked.mean(), rel=1e-5)
    expected = ranked((scores[counts] >= picked).sum(1))
    found = {
        m.key: v / total.weight
        for m, v in zip(RECOMMENDATION.measures, total.measures, strict=True)
    }
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_absent_items_have_no_probability_no_rank_and_no_influence(backend: str) -> None:
    """Cluster 1 holds items 5 to 8, of which 6 and 8 are absent."""
    weights, rows = Weights(MODEL, 1), batch()
    rows["targets"][np.isin(rows["targets"], (6, 8))] = 0
    rows = Batch(rows.arrays, float((rows["targets"] > 0).sum()))
    fewer = msgspec.structs.replace(MODEL, absent=(6, 8))
    scores = at_every_position(backend, fewer, weights, rows["items"][0])
    kept = np.array([0, 1, 2, 3, 4, 6, 8, 9, 10])
    np.testing.assert_allclose(np.exp(scores[..., kept]).sum(-1), 1.0, rtol=1e-5)
    assert np.exp(scores).sum(-1) == pytest.approx(1.0, rel=1e-5)
    whole = at_every_position(backend, MODEL, weights, rows["items"][0])
    same = [0, 1, 2, 3, 8, 9, 10]  # the other clusters
    np.testing.assert_allclose(scores[..., same], whole[..., same], atol=1e-5)
    made = plan(backend)
    engine = CREATE[backend](made, None)
    engine.prepare(made, MODEL)
    engine.build(made, fewer, 100, weights)
    total = engine.evaluate([rows])
    counts = rows["targets"][0] > 0
    picked = np.take_along_axis(scores[counts], rows["targets"][0][counts][:, None] - 1, axis=1)
    expected = ranked((scores[counts][:, kept] >= picked).sum(1))
    assert total.mean == pytest.approx(-picked.mean(), rel=1e-5)
    for measure, value in zip(RECOMMENDATION.measures, total.measures, strict=True):
        assert value / total.weight == pytest.approx(expected[measure.key], rel=1e-5)
    engine.train_step(rows)
    assert engine.take_metrics()[0].loss == pytest.approx(total.mean, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_items_with_equal_scores_share_their_ranks(backend: str) -> None:
    """All items have a row of zeros, whose scores are equal on every processor: chance is a Recall@1 of 1 in 12, and the
    clusters are as likely."""
    model = msgspec.structs.replace(MODEL, items=12)
    weights, rows = Weights(model, 1), batch()
    for name in ("items.weight", "clusters.weight"):
        weights.tensors[name][:] = 0.0
    made = plan(backend)
    engine = CREATE[backend](made, None)
    engine.build(made, model, 100, weights)
    total = engine.evaluate([rows])
    found = {
        m.key: v / total.weight
        for m, v in zip(RECOMMENDATION.measures, total.measures, strict=True)
    }
    assert total.mean == pytest.approx(np.log(12), rel=1e-5)
    assert found["recall_at_1"] == pytest.approx(1 / 12, rel=1e-5)
    assert found["recall_at_10"] == pytest.approx(10 / 12, rel=1e-5)
    assert found["mrr_at_10"] == pytest.approx(sum(1 / r for r in range(1, 11)) / 12, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_positions_with_a_target_are_scored_in_chunks_of_any_size(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, none = Weights(MODEL, 1), batch(seed=3)
    none["targets"][:] = 0
    few = batch(seed=4)
    few["targets"][:, :, :-2] = 0
    rows = [Batch(b.arrays, float((b["targets"] > 0).sum())) for b in (batch(), few, none)]
    whole = built(backend, weights).evaluate(rows)
    monkeypatch.setattr(recommender, "CHUNK_BYTES", 4 * MODEL.rows * 3)
    assert MODEL.scored_positions == 3
    engine = built(backend, weights)
    chunks = engine.evaluate(rows)
    assert (chunks.loss, *chunks.measures) == pytest.approx((whole.loss, *whole.measures), rel=1e-5)
    assert engine.evaluate(rows[2:]).loss == 0
    if backend == "torch":
        scored: list[int] = []
        scores = two_level.scores

        def counting(model: Recommender, found: Any) -> Any:
            scored.append(len(found.hidden))
            return scores(model, found)

        monkeypatch.setattr(two_level, "scores", counting)
        engine.evaluate(rows)
        assert sum(scored) == sum(row.weight for row in rows)


SAME: dict[str, dict[str, Any]] = {
    "accumulated, average": {"optimize__accumulation_steps": 2, "train__ema_decay": 0.9},
    "bf16, nf4, checkpointed": {
        "optimize__precision": "bf16",
        "optimize__base_storage": "nf4",
        "optimize__gradient_checkpointing": "full",
    },
    "bf16-sr, nf4": {"optimize__precision": "bf16-sr", "optimize__base_storage": "nf4"},
    "all trained": {"optimize__freeze_base": False},
}


@pytest.mark.parametrize("case", SAME)
def test_both_backends_take_the_same_steps(case: str) -> None:
    settings, told = SAME[case], []
    for backend in BACKENDS:
        engine = built(backend, **settings)
        for step in range(4):
            engine.train_step(batch(settings.get("optimize__accumulation_steps", 1), seed=step % 2))
        total = engine.evaluate([batch(seed=9)])
        told.append([m.loss for m in engine.take_metrics()] + [total.mean])
    assert told[0] == pytest.approx(told[1], rel=1e-2 if "bf16" in case else 1e-4)
    assert told[0][2] < told[0][0]


@pytest.mark.parametrize("storage", ["int8", "nf4"])
def test_a_body_in_codes_computes_as_one_with_the_decoded_matrices(storage: str) -> None:
    weights, decoded = Weights(MODEL, 1), Weights(MODEL, 1)
    codes = plan("torch", optimize__base_storage=storage)
    for p in MODEL.parameters():
        decoded.tensors[p.name] = base_storage.stored(codes, p, weights.tensor(p.name))
    plain = built("torch", decoded).evaluate([batch()])
    for backend in BACKENDS:
        engine = built(backend, weights, optimize__base_storage=storage)
        assert engine.evaluate([batch()]).mean == pytest.approx(plain.mean, rel=1e-5)
        before = state(engine)
        engine.train_step(batch())
        after = state(engine)
        assert before.keys() == after.keys()
        assert not np.array_equal(before["model.items.weight"], after["model.items.weight"])


def test_the_recommender_continues_no_text() -> None:
    with pytest.raises(ValueError, match="no text"):
        built("torch").generate([1], 1)
