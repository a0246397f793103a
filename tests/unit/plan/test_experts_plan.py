"""Plans of models with experts: what is refused, what the recipe sets, and how many parameters a token uses."""

from __future__ import annotations

from typing import Any

import pytest

from memconsole.memory.estimate import estimate
from memconsole.memory.seconds import forward_flops_per_token
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.training import recipe
from tests.unit.memory.cards import card

OLMOE = replace(Plan(), {"model.name": "olmoe-1b-7b", "device.name": "h100-80gb"})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optimize.compile", True, "expected false"),
        ("optimize.lora_targets", "mlp", "expected attention"),
    ],
)
def test_what_experts_are_not_trained_with_is_refused(key: str, value: Any, words: str) -> None:
    adapters = {"optimize.lora_rank": 8, "optimize.freeze_base": True, "model.weights": "random"}
    plan = replace(OLMOE, {**(adapters if "lora" in key else {}), key: value})
    with pytest.raises(PlanError, match=f"olmoe-1b-7b has experts; .*{words}"):
        check(plan)
    check(replace(plan, {"model.name": "olmo-2-1b"}))


def test_a_recommenders_decoder_has_no_experts() -> None:
    changes = {"model.name": "efficientids", "model.decoder": "olmoe-1b-7b"}
    with pytest.raises(PlanError, match=r"model\.decoder = .*has experts"):
        catalog.model(replace(Plan(), changes))


def test_only_models_with_experts_have_a_loss_for_balance() -> None:
    assert recipe.with_recipe(OLMOE).train.expert_balance == recipe.EXPERT_BALANCE
    assert "expert balance 0.01" in recipe.words(OLMOE)
    plain = replace(OLMOE, {"model.name": "olmo-2-1b"})
    assert recipe.with_recipe(plain).train.expert_balance is None
    assert recipe.settings_by_recipe(plain) == recipe.settings_by_recipe(OLMOE) - {
        "train.expert_balance"
    }
    assert "balance" not in recipe.words(plain)
    for name in ("olmo-2-1b", "gpt2"):
        with pytest.raises(PlanError, match=r"train\.expert_balance = 0\.1: .* has no experts"):
            check(replace(plain, {"model.name": name, "train.expert_balance": 0.1}))


def test_a_token_uses_the_experts_that_it_goes_to() -> None:
    a = catalog.architecture(OLMOE)
    size = dict.fromkeys(("matrix", "experts", "head"), 0)
    for p in a.parameters():
        size[p.role] = size.get(p.role, 0) + p.size
    used = a.experts // a.experts_per_token
    device = card(80 * 2**30)
    found = estimate(OLMOE, device).active_parameters
    assert found == sum(size.values()) - size["experts"] + size["experts"] // used
    assert found == pytest.approx(1.3e9, rel=0.02)  # the published number
    attention = 2 * 128 * a.query_width * a.layers
    multiplied = size["matrix"] + size["experts"] // used + size["head"]
    assert forward_flops_per_token(a, 128) == 2 * multiplied + attention
    assert estimate(replace(OLMOE, {"model.name": "olmo-2-1b"}), device).active_parameters is None
