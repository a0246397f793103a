"""The recommender's record, its task, and what a plan of it may not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.tasks import RECOMMENDATION, task_of
from memconsole.plan.training.trained import frozen_names
from memconsole.start import check_launch
from memconsole_trainer.data.ratings.numbering import places


def plan(**changes: Any) -> Plan:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(catalog.preset("efficientids"), settings)


def model_of(made: Plan) -> Recommender:
    found = catalog.model(made)
    assert isinstance(found, Recommender)
    return found


def test_a_recommender_is_a_table_and_an_adapter_around_the_blocks_of_a_decoder() -> None:
    gemma = catalog.models()["gemma-2b"]
    model = model_of(plan(model__name="efficientids-gemma-2b"))
    sizes = {p.name: p.size for p in model.parameters()}
    own = {n: s for n, s in sizes.items() if n.startswith(("items.", "clusters.", "adapter."))}
    assert own == {
        "items.weight": (1 + 100 * 33) * 384,
        "clusters.weight": 100 * 384,
        "adapter.up.weight": 384 * 1536,
        "adapter.up.bias": 1536,
        "adapter.down.weight": 1536 * 2048,
        "adapter.down.bias": 2048,
    }
    assert gemma.parameters is not None
    assert sum(sizes.values()) - sum(own.values()) == gemma.parameters - 256_000 * 2048
    assert "embedding.weight" not in sizes


@pytest.mark.parametrize("name", ["efficientids", "efficientids-gemma-2b"])
def test_published_sizes_are_those_of_the_record(name: str) -> None:
    model = model_of(plan(model__name=name))
    assert sum(p.size for p in model.parameters()) == catalog.models()[name].parameters


def test_a_frozen_base_is_the_decoder() -> None:
    frozen = plan(optimize__freeze_base=True)
    model = model_of(frozen)
    names = frozen_names(frozen, model)
    assert len(names) == model.layers * 9 + 1
    assert all(name.startswith(("layers.", "norm.")) for name in names)
    assert frozen_names(plan(), model) == ()


@pytest.mark.parametrize(("items", "clusters"), [(11, 3), (12, 4), (5, 5), (100, 7)])
def test_every_item_has_one_place_in_a_cluster(items: int, clusters: int) -> None:
    model = model_of(plan(model__items=items, model__clusters=clusters))
    found = places(model).tolist()
    assert len(found) == items
    assert sum(model.members(c) for c in range(clusters)) == items
    assert min(found) > 0
    assert max(found) < model.rows
    members = [(item - 1) // model.cluster_size for item in found]
    assert [members.count(c) for c in range(clusters)] == [
        model.members(c) for c in range(clusters)
    ]


def test_the_decoder_of_a_plan_replaces_that_of_the_entry() -> None:
    assert model_of(plan(model__decoder="llama-3.2-1b")).hidden_size == 2048
    with pytest.raises(PlanError, match=r"model\.decoder = \"gema-2b\".*did you mean \"gemma-2b\""):
        catalog.model(plan(model__decoder="gema-2b"))
    with pytest.raises(PlanError, match="of a fixed size"):
        catalog.model(plan(model__decoder="stories"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__source": "python-stdlib"}, r"learns from ratings; expected a table"),
        ({"model__clusters": 2000}, r"expected at most model\.items = 1,000"),
        ({"optimize__lora_rank": 8}, "item table and its adapter are trained instead"),
        (
            {"optimize__base_storage": "nf4"},
            r"only a frozen base can be stored in codes; set optimize\.freeze_base too",
        ),
        ({"model__decoder": "gpt2", "data__sequence_length": 2048}, "1,024 learned positions"),
        ({"model__name": "stories", "model__items": 10}, "not a recommender"),
    ],
)
def test_impossible_plans_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    check(plan())
    with pytest.raises(PlanError, match=message):
        check(plan(**changes))


def test_a_preset_is_priced_before_its_data_are_made_and_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(plan())
    with pytest.raises(
        PlanError, match="memconsole data make ratings ratings --size 20k writes it"
    ):
        check_launch(plan(device__name="cpu"), None)
    with pytest.raises(PlanError, match="no such file"):
        check(plan(data__source="elsewhere/ratings.dat"))


def test_measures_are_named_once_and_few_are_headlines() -> None:
    task = task_of(plan())
    assert task is RECOMMENDATION
    keys = [m.key for m in (*task.measures, *task.derived, *task.baselines)]
    assert len(keys) == len(set(keys)) == 28
    shown = [m.name for m in (*task.measures, *task.derived) if m.headline]
    assert shown == ["R@10", "NDCG@10", "popularity R@10", "item-kNN R@10"]
