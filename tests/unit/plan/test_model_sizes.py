"""Sizes of regressors and recommenders that a plan chooses."""

from __future__ import annotations

from typing import Any

import pytest

from memconsole.memory.answers.advice import remedies
from memconsole.memory.estimate import estimate
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_trainer.loop.fingerprint import fingerprint

SMALL = Budget(
    name="cpu", kind="cpu", memory_label="host RAM", total_bytes=2**30, usable_bytes=2**27, why="test"
)  # fmt: skip


def plan(preset: str, **changes: Any) -> Plan:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(catalog.preset(preset), settings)


def size(made: Plan) -> int:
    check(made)
    return estimate(made, SMALL).parameters


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, 208_774),
        ({"model__layers": 2}, 109_318),
        ({"model__hidden_size": 32}, 55_238),
        ({"model__layers": 6, "model__hidden_size": 256, "model__heads": 8}, 4_771_846),
    ],
)
def test_a_plan_sets_the_size_of_a_regressor(changes: dict[str, Any], parameters: int) -> None:
    made = plan("lqr", **changes)
    model = catalog.model(made)
    assert isinstance(model, Regressor)
    assert model.intermediate_size == 4 * model.hidden_size
    assert size(made) == sum(p.size for p in model.parameters()) == parameters


def test_a_plan_sets_the_widths_of_a_recommender() -> None:
    made = plan("efficientids", model__embedding_size=64, model__adapter_size=100)
    model = catalog.model(made)
    assert isinstance(model, Recommender)
    shapes = {p.name: p.shape for p in model.parameters()}
    assert shapes["items.weight"] == (model.rows, 64)
    assert shapes["clusters.weight"] == (model.clusters, 64)
    assert shapes["adapter.up.weight"] == (100, 64)
    assert shapes["adapter.down.weight"] == (128, 100)
    assert size(made) == sum(p.size for p in model.parameters())


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("lqr", {"model__heads": 5}, r"model\.hidden_size = 64: expected a multiple of model\.heads = 5"),
        ("lqr", {"model__hidden_size": 102}, r"= 102: expected a multiple of model\.heads = 4"),
        ("lqr", {"model__layers": 0}, r"model\.layers = 0: expected a whole number >= 1 and <= 128"),
        ("lqr", {"model__target_params": 10**6}, r"sized by model\.layers and model\.hidden_size"),
        ("lqr", {"model__adapter_size": 9}, r'model\.adapter_size = 9: "lqr" is not a recommender'),
        ("lqr", {"data__user_column": "who"}, r'data\.user_column = "who": is for ratings; lqr reads none'),
        ("efficientids", {"model__layers": 2}, r'model\.layers = 2: "efficientids" is not a regressor'),
        ("stories", {"model__hidden_size": 64}, r'model\.hidden_size = 64: "stories" is not a regressor'),
    ],
)  # fmt: skip
def test_sizes_that_no_model_has_are_refused(
    preset: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check(plan(preset, **changes))


def test_another_model_has_its_own_sizes() -> None:
    changed = catalog.choose(plan("lqr", model__layers=2), "model.name", "stories")
    assert changed.model.layers is None
    dropping = plan("lqr", train__dropout=0.1)
    assert catalog.choose(dropping, "model.name", "lqr") == dropping


@pytest.mark.parametrize(
    ("preset", "key"), [("lqr", "layers"), ("lqr", "heads"), ("efficientids", "embedding_size")]
)
def test_a_checkpoint_of_another_size_is_not_resumed(preset: str, key: str) -> None:
    before, after = plan(preset), plan(preset, **{f"model__{key}": 2})
    assert fingerprint(before, catalog.model(before)) != fingerprint(after, catalog.model(after))
    same = plan(preset, **{f"model__{key}": getattr(catalog.model(before), key)})
    assert fingerprint(before, catalog.model(before)) == fingerprint(same, catalog.model(same))


@pytest.mark.parametrize(
    ("model", "begins"),
    [
        ("stories", "812440bd366c35a5"), ("llama-3.2-1b", "e5a972499639cc21"),
        ("gemma-3-1b", "f55477351eed4bed"), ("lqr", "cdb7a8eeb87b1a30"),
        ("efficientids", "f958e23ba9469aeb"),
    ],
)  # fmt: skip
def test_checkpoints_of_a_version_with_fewer_fields_are_resumed(model: str, begins: str) -> None:
    """The fingerprints are of version 0.1.0 before models had rotary sizes. They must not change."""
    own = replace(Plan(), {"model.name": model})
    assert fingerprint(own, catalog.model(own)).startswith(begins)


def test_a_narrower_regressor_is_offered_where_memory_is_short() -> None:
    made = plan("lqr", train__batch_size=4096, model__hidden_size=24)
    offered = [r.changes for r in remedies(made, SMALL) if "model.hidden_size" in r.changes]
    assert offered, "12 is a multiple of 4 heads, 6 and 3 are not"
    assert offered == [{"model.hidden_size": 12}]
