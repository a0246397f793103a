"""Rate, warm-up and weight decay follow model, weights, optimizer and adapters, and never replace what a plan sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from memconsole.cli.options import build_plan
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.data.paths import load
from memconsole.plan.plan import OptimizerName, Plan, PlanError, replace
from memconsole.plan.plan_file import dumps, loads
from memconsole.plan.training import recipe
from memconsole.plan.training.recipe import kept_rate, learning_rate
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import create_run

DEFAULT = catalog.default_plan()


def a_plan(**changes: object) -> Plan:
    plan = DEFAULT
    for key, value in changes.items():
        plan = catalog.choose(plan, key.replace("__", "."), value)
    return plan


def test_the_rate_falls_with_the_size_as_in_published_runs() -> None:
    assert recipe.learning_rate(DEFAULT) == 2e-3
    # GPT-3 small took 6e-4 (Brown et al. 2020, table 2.1), Llama 2 7B 3e-4 (Touvron et al. 2023)
    for name, published in (("gpt2", 6e-4), ("llama-2-7b", 3e-4)):
        assert published / 1.5 < recipe.learning_rate(a_plan(model__name=name)) < 1.5 * published


def test_a_picked_optimizer_has_its_own_rate_and_takes_as_much_off_the_weights() -> None:
    rates = {}
    for name in recipe.OPTIMIZER_FACTORS:
        plan = a_plan(optimize__optimizer=name)
        rates[name] = recipe.learning_rate(plan)
        shrinking = rates[name] * recipe.weight_decay(plan)
        assert shrinking == pytest.approx(2e-3 * 0.1, rel=0.05), name
    assert rates["lion"] < rates["adamw"] == rates["adamw-8bit"] < rates["adafactor"] < rates["sgd"]


def test_every_optimizer_of_the_plan_has_a_rate() -> None:
    assert set(recipe.OPTIMIZER_FACTORS) == set(get_args(OptimizerName))


def test_trained_weights_take_a_tenth_and_adapters_on_them_the_whole(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    new = a_plan(model__name=str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    rate = recipe.learning_rate(new)
    assert rate == pytest.approx(2e-3 * 0.1)
    assert recipe.weight_decay(new) == 0.01
    assert recipe.warmup_steps(new, 1000) == 30
    assert "trained before" in recipe.words(new)
    adapted = replace(new, {"optimize.lora_rank": 8, "optimize.freeze_base": True})
    assert recipe.learning_rate(adapted) == 10 * rate
    assert recipe.learning_rate(replace(new, {"model.weights": "random"})) == 10 * rate


def test_what_a_plan_sets_stays() -> None:
    mine = a_plan(train__learning_rate=7e-4, train__weight_decay=0.3, train__warmup_steps=7)
    for changes in ({"model.name": "gpt2"}, {"optimize.optimizer": "lion"}):
        changed = replace(mine, changes)
        assert recipe.learning_rate(changed) == 7e-4
        assert recipe.weight_decay(changed) == 0.3
        assert recipe.warmup_steps(changed, 1000) == 7
        assert "as set" not in recipe.words(changed)  # nothing follows


def a_run(given: Plan) -> RunDirectory:
    return create_run(recipe.with_recipe(given), by_recipe=recipe.settings_by_recipe(given))


def test_a_launched_run_keeps_its_numbers_and_another_run_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    given = a_plan(train__weight_decay=0.3)
    run = a_run(given)
    whole, by_recipe = run.read_settled_plan()
    assert (whole.train.learning_rate, whole.train.weight_decay) == (2e-3, 0.3)
    assert whole == run.read_plan() == recipe.with_recipe(whole)
    assert by_recipe == {"train.learning_rate"}
    assert "learning rate 0.002; warm-up" in recipe.words(whole, by_recipe)
    assert recipe.words(whole, by_recipe).endswith("as set: weight decay 0.3")
    assert run.read_given_plan() == load(run.plan_path) == given
    opened = build_plan(None, run.plan_path, ("model.name=gpt2",))
    assert recipe.learning_rate(opened) == recipe.learning_rate(a_plan(model__name="gpt2"))


def test_a_resumed_run_keeps_the_numbers_that_it_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = a_run(DEFAULT)
    run.write_plan(replace(run.read_plan(), {"train.learning_rate": 1e-4, "train.epochs": 9}))
    whole, by_recipe = run.read_settled_plan()
    assert (whole.train.learning_rate, whole.train.weight_decay) == (1e-4, 0.1)
    assert by_recipe == {"train.weight_decay"}
    assert run.read_given_plan() == replace(
        DEFAULT, {"train.learning_rate": 1e-4, "train.epochs": 9}
    )


def test_the_run_directory_of_an_older_version_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    older = recipe.with_recipe(DEFAULT)
    run = create_run(older)
    assert run.plan_path.read_text() == dumps(older)
    assert run.read_settled_plan() == (older, frozenset())
    assert run.read_given_plan() == older


def test_a_damaged_table_of_the_recipe_is_refused() -> None:
    with pytest.raises(PlanError, match=r"plan: \[by_recipe\] must be a table, not 3"):
        loads("by_recipe = 3")
    with pytest.raises(PlanError, match=r"plan: train\.learning_rate = 0: expected a number > 0"):
        loads('[by_recipe]\n"train.learning_rate" = 0')


def test_the_warm_up_is_a_share_of_the_run() -> None:
    assert [recipe.warmup_steps(DEFAULT, n) for n in (5, 240, 1_000_000)] == [0, 24, 2_000]
    share = a_plan(train__warmup_ratio=0.25)
    assert recipe.warmup_steps(share, 1_000_000) == 250_000
    assert "warm-up 25% of the steps" in recipe.words(share)


def test_steps_and_share_of_a_warm_up_replace_each_other() -> None:
    steps = a_plan(train__warmup_ratio=0.25, train__warmup_steps=9)
    assert (steps.train.warmup_ratio, recipe.warmup_steps(steps, 100)) == (None, 9)
    share = catalog.choose(steps, "train.warmup_ratio", 0.25)
    assert (share.train.warmup_steps, recipe.warmup_steps(share, 100)) == (None, 25)
    with pytest.raises(PlanError, match=r"train\.warmup_ratio = 0\.5: .*set one of them"):
        check(replace(steps, {"train.warmup_ratio": 0.5}))


def test_adapters_are_not_decayed_and_take_the_whole_rate() -> None:
    adapters = a_plan(optimize__lora_rank=8, optimize__freeze_base=True)
    assert recipe.learning_rate(adapters) == 2e-3
    assert recipe.weight_decay(adapters) == 0.0
    assert not recipe.decays(adapters)
    assert "LoRA rank 8" in recipe.words(adapters)


def test_a_rate_that_a_person_set_for_another_optimizer_is_told() -> None:
    given = replace(Plan(), {"train.learning_rate": 3e-4})
    lion = replace(given, {"optimize.optimizer": "lion"})
    own = learning_rate(replace(Plan(), {"optimize.optimizer": "lion"}))
    words = kept_rate(given, lion)
    assert words.startswith(
        "train.learning_rate stays 0.0003, as set for adamw; for lion the recipe has "
    )
    assert f"has {own:g} (" in words
    assert kept_rate(given, replace(given, {"optimize.optimizer": "adamw-8bit"})) == ""
    assert kept_rate(Plan(), replace(Plan(), {"optimize.optimizer": "lion"})) == ""


def test_the_warm_up_of_a_run_that_is_too_short_for_it_is_told() -> None:
    plan = a_plan(train__warmup_steps=200)
    assert "warm-up 200 steps" in recipe.words(plan)
    assert "since" not in recipe.words(plan, total_steps=400)
    assert (
        "warm-up 3 steps, since train.warmup_steps = 200 is more than half of the run"
        in recipe.words(plan, total_steps=30)
    )
