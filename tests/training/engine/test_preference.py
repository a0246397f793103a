"""DPO, ORPO and SimPO in both backends, against their formulas differentiated by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace
from memconsole.plan.sections.train import TrainChoice
from memconsole.plan.tasks.preference import LEAST_SHARE
from memconsole_jax import engine as jax_engine
from memconsole_jax.tasks import preference as jax_preference
from memconsole_torch import engine as torch_engine
from memconsole_torch.models import pretrained
from memconsole_torch.models.decoder import Decoder
from memconsole_torch.tasks import preference as torch_preference
from memconsole_trainer.engine import Batch, Engine
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models

torch.set_num_threads(1)

BETA, LENGTH, MASKED = 0.3, 12, -100
CREATE: dict[str, Callable[[Plan, None], Engine]] = {
    "torch": torch_engine.create,
    "jax": jax_engine.create,
}


def plan_of(backend: str, **changes: Any) -> Plan:
    settings = {
        "backend": backend,
        "device.name": "cpu",
        "data.sequence_length": LENGTH,
        "train.objective": "dpo",
        "train.dpo_beta": BETA,
        "train.orpo_lambda": 0.7,
        "train.batch_size": 4,
        "train.grad_clip": 0.0,
        "train.learning_rate": 1.0,
        "train.warmup_steps": 0,
        "train.schedule": "constant",
        "train.weight_decay": 0.0,
        "optimize.optimizer": "sgd",
        "train.beta1": 0.0,
        "optimize.accumulation_steps": 2,
    }
    return replace(Plan(), settings | {k.replace("__", "."): v for k, v in changes.items()})


def batch_of(objective: str = "dpo") -> Batch:
    """Two micro-batches of two pairs, the last of which is padding. Answers have different lengths, and the third pair has no
    rejected one."""
    draw = np.random.default_rng(4)
    arrays = dict(tiny_models.batch(2, 4, LENGTH).arrays)
    targets = arrays["targets"].copy()
    for row, (first, last) in enumerate(draw.integers(1, LENGTH, (8, 2))):
        targets.reshape(8, LENGTH)[row, : min(first, last)] = MASKED
    targets.reshape(8, LENGTH)[5:] = MASKED
    if objective == "dpo":
        arrays["reference"] = draw.normal(-20.0, 4.0, (2, 4)).astype(np.float32)
    return Batch({**arrays, "targets": targets}, 3.0)


def built(plan: Plan, architecture: Architecture) -> Engine:
    engine = CREATE[plan.backend](plan, None)
    engine.build(plan, architecture, 10, InitialWeights(architecture, 1))
    return engine


def weights_of(engine: Engine) -> dict[str, np.ndarray]:
    return {n: a.copy() for n, a in engine.state() if n.startswith("model.")}


def formula(
    t: TrainChoice, likelihoods: torch.Tensor, rows: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each pair that counts, and the rewards of its answers, as the papers write them."""
    lengths = (rows["targets"] != MASKED).sum(1).view(4, 2)[:3]
    sums = likelihoods.view(4, 2)[:3]
    means = sums / lengths.clamp(min=1)
    both = (lengths > 0).all(1)
    if t.objective == "dpo":
        rewards = BETA * (sums - rows["reference"].view(4, 2)[:3])
        return -functional.logsigmoid(rewards[:, 0] - rewards[:, 1]), rewards
    if t.objective == "simpo":
        rewards = t.simpo_beta * means * both[:, None]
        margins = rewards[:, 0] - rewards[:, 1] - t.simpo_gamma
        return torch.where(both, -functional.logsigmoid(margins), 0.0), rewards
    shares = means.exp().clamp(max=0.999)  # the missing answer's is 1
    odds = shares / (1 - shares)
    rewards = odds.log() * both[:, None]
    preference = -functional.logsigmoid((odds[:, 0] / odds[:, 1]).log())
    return -means[:, 0] + t.orpo_lambda * preference * both, rewards


def expected(
    architecture: Architecture, batch: Batch, t: TrainChoice
) -> tuple[dict[str, np.ndarray], list[float], np.ndarray]:
    """Gradients of the mean loss by name, the sums of an evaluation, and the log-likelihoods of all rows, by autograd of
    the formula from full logits."""
    weights = InitialWeights(architecture, 1)
    module = pretrained.load(
        architecture, lambda: Decoder(architecture), weights, torch.device("cpu")
    )
    rows = {
        n: torch.from_numpy(np.ascontiguousarray(a.reshape(8, *a.shape[2:])))
        for n, a in batch.arrays.items()
    }
    logits, targets = module.scores(module(rows["inputs"])), rows["targets"].long()
    nats = functional.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=MASKED, reduction="none"
    )
    likelihoods = -nats.sum(1)
    losses, rewards = formula(t, likelihoods, rows)
    chosen, rejected = rewards.unbind(1)
    loss = losses.sum()
    (loss / 3).backward()
    found = dict(module.named_parameters())
    gradients = {p.name: found[p.name].grad.numpy() for p in architecture.parameters() if p.used}
    sums = [
        loss,
        (chosen > rejected).sum(),
        (chosen - rejected).sum(),
        chosen.sum(),
        rejected.sum(),
    ]
    return gradients, [float(x.detach()) for x in sums], likelihoods.detach().numpy()


@pytest.mark.parametrize("backend", CREATE)
@pytest.mark.parametrize(
    ("kind", "chunked", "objective"),
    [
        ("llama", False, "dpo"),
        ("llama-untied", True, "dpo"),
        ("gemma2", False, "dpo"),
        ("gemma2", True, "dpo"),
        ("qwen3_moe", True, "dpo"),
        ("llama", False, "orpo"),
        ("llama-untied", True, "orpo"),
        ("llama", True, "simpo"),
        ("llama-untied", False, "simpo"),
    ],
)
def test_gradients_loss_and_measures_are_those_of_the_formula(
    backend: str, kind: str, chunked: bool, objective: str
) -> None:
    architecture, batch = tiny_models.ARCHITECTURES[kind], batch_of(objective)
    plan = plan_of(backend, optimize__fused_loss=chunked, train__objective=objective)
    gradients, sums, likelihoods = expected(architecture, batch, plan.train)
    engine = built(plan, architecture)

    found = engine.evaluate([batch])
    assert [found.loss, *found.measures] == pytest.approx(sums, rel=1e-5, abs=1e-5)
    for number in range(2):
        part = Batch({n: a[number : number + 1] for n, a in batch.arrays.items()}, 1.0)
        own = engine.outputs(part)
        assert own == pytest.approx(likelihoods[4 * number : 4 * number + 4], rel=1e-5, abs=1e-5)

    before = weights_of(engine)
    engine.train_step(batch)
    (metrics,) = engine.take_metrics()
    assert metrics.loss == pytest.approx(sums[0] / 3, rel=1e-5)
    after = weights_of(engine)
    for name, gradient in gradients.items():
        moved = before[f"model.{name}"] - after[f"model.{name}"]
        assert np.abs(moved - gradient).max() <= 1e-4 * np.abs(gradient).max() + 1e-7, name


@pytest.mark.parametrize("backend", CREATE)
def test_orpo_of_a_certain_answer_has_the_finite_slopes_of_its_formula(backend: str) -> None:
    """The odds of an answer of probability 1 are taken as those of 1 - 1e-6."""
    plan, tokens = plan_of(backend, train__objective="orpo"), 3
    targets = np.full((4, LENGTH), MASKED)
    targets[:, :tokens] = 1
    nats = torch.tensor([0.0, 2.0, 3.0, 1e-9], requires_grad=True)
    means = (nats / tokens).view(2, 2)
    odds = -means - (-torch.expm1(-means)).clamp(min=LEAST_SHARE).log()
    losses = means[:, 0] - plan.train.orpo_lambda * functional.logsigmoid(odds[:, 0] - odds[:, 1])
    losses.sum().backward()
    assert nats.grad is not None
    if backend == "jax":
        found: Any = jax_preference.of_pairs(
            plan.train, jnp.asarray(nats.detach().numpy()), jnp.asarray(targets), None
        )
    else:
        task = torch_preference.Preference(plan, tiny_models.ARCHITECTURES["llama"])
        found = task._pairs(nats.detach(), torch.from_numpy(targets), None)
    assert np.asarray(found.losses) == pytest.approx(losses.detach().numpy(), rel=1e-5)
    assert np.asarray(found.slopes) == pytest.approx(nats.grad.numpy(), rel=1e-4)


@pytest.mark.parametrize("backend", CREATE)
def test_the_starting_weights_have_no_preference_and_a_step_gains_one(backend: str) -> None:
    """With the likelihoods of the starting weights themselves as reference."""
    architecture, batch = tiny_models.ARCHITECTURES["llama"], batch_of()
    settings = {
        "optimize__optimizer": "adamw",
        "train__learning_rate": 1e-3,
        "optimize__lora_rank": 4,
    }
    engine = built(plan_of(backend, **settings), architecture)
    scored = [
        engine.outputs(Batch({n: a[i : i + 1] for n, a in batch.arrays.items()}, 1.0))
        for i in range(2)
    ]
    batch = Batch({**batch.arrays, "reference": np.stack(scored)}, batch.weight)
    start = engine.evaluate([batch])
    assert start.mean == pytest.approx(np.log(2.0), rel=1e-5)
    assert start.measures[1:] == pytest.approx([0.0, 0.0, 0.0], abs=1e-4)
    for _ in range(5):
        engine.train_step(batch)
    found = engine.evaluate([batch])
    assert found.measures[0] == 3.0, "of all pairs"
    assert found.mean < start.mean - 1e-3
