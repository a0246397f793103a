"""AdamW and SGD compute bit for bit what torch's own fused optimizers compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memconsole_torch.techniques.optimizer.rule import FusedAdamW, FusedSGD

torch.set_num_threads(1)
BETAS, EPSILON = (0.9, 0.95), 1e-8
RULES = {
    "adamw": (
        lambda groups: FusedAdamW(groups, BETAS, EPSILON),
        lambda groups: torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=True),
        ("step", "exp_avg", "exp_avg_sq"),
    ),
    "sgd": (
        lambda groups: FusedSGD(groups, 0.9),
        lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=True),
        ("momentum_buffer",),
    ),
    "sgd without momentum": (
        lambda groups: FusedSGD(groups, 0.0),
        lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=0.0, fused=True),
        (),
    ),
}


def taken(make: Any, slots: tuple[str, ...], skipped: int | None) -> list[torch.Tensor]:
    """Weights and state after five steps in two groups, of which the `skipped`-th is skipped."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((7, 33), (40,), (5,))
    ]
    groups = [
        {"params": weights[:2], "weight_decay": 0.1},
        {"params": weights[2:], "weight_decay": 0.0},
    ]
    rule = make(groups)
    for p in weights:
        rule.state[p].update({s: torch.zeros(() if s == "step" else p.shape) for s in slots})
    for number in range(5):
        for p in weights:
            p.grad = torch.randn(p.shape, generator=generator)
        if number == 2:
            weights[1].grad = None  # a weight that took no part
        live = torch.tensor(float(number != skipped))
        for group in rule.param_groups:
            group["lr"] = 1e-2 / (1 + number)
            if skipped is not None and "live" in rule.defaults:
                group["live"] = live
        if skipped is not None and "live" not in rule.defaults:
            rule.found_inf = 1 - live
        rule.step()
    rule.zero_grad()
    assert all(p.grad is None for p in weights)
    return [*(p.detach() for p in weights), *(rule.state[p][s] for p in weights for s in slots)]


@pytest.mark.parametrize("skipped", [None, 1])
@pytest.mark.parametrize("name", RULES)
def test_steps_are_those_of_torch_bit_for_bit(name: str, skipped: int | None) -> None:
    ours, torchs, slots = RULES[name]
    found, expected = taken(ours, slots, skipped), taken(torchs, slots, skipped)
    assert not torch.equal(found[0], torch.zeros_like(found[0]))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
