"""Learning rate, warm-up and weight decay of plans that do not set them.

They follow the model's size, where its weights come from, the optimizer and adapters. A value that a plan sets is
never changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import lru_cache

from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import OptimizerName, Plan, get, replace
from memconsole.plan.training.origin import FINE_TUNES, FROM_RUN, shortly
from memconsole.units import format_count

SMALL_MODEL_RATE, SMALL_MODEL_PARAMETERS, RATE_EXPONENT = 2e-3, 1e6, -0.25
"""AdamW's rate of a model of `SMALL_MODEL_PARAMETERS` from scratch, and the exponent with which it falls with the size:
6e-4 at 125 M, 3.3e-4 at 1.3 B, 2.2e-4 at 7 B and 1.2e-4 at 70 B. Published runs took 6e-4, 2e-4 (Brown et al. 2020, table 2.1), 3e-4 and 1.5e-4
(Touvron et al. 2023, §2.2)."""
OPTIMIZER_FACTORS: dict[OptimizerName, float] = {
    "adamw": 1.0,
    "adamw-8bit": 1.0,
    "adamw8-all": 1.0,
    "muon": 1.0,  # its updates have the size of AdamW's (Liu et al. 2025, §2.2)
    "apollo-mini": 4.0,  # one factor for a whole matrix; the authors' script for 350 M takes 0.01
    "lion": 0.3,  # 3 to 10 times smaller (Chen et al. 2023, §5)
    "adafactor": 10.0,  # its rate is a share of each weight's size (Shazeer and Stern 2018, §8)
    "sgd": 200.0,
}
"""Each optimizer's rate, as a multiple of AdamW's. `tests/bench/recipe.py` trains a model with each."""
FINE_TUNING_FACTOR = 0.1
"""Share of the rate for weights that were trained before. Adapters take the whole rate: a tenth of it trains them too
slowly (Dettmers et al. 2023, §4: 2e-4 for 7 B, 1e-4 for 65 B)."""
OBJECTIVE_FACTORS: dict[str, float] = {"dpo": 0.05, "orpo": 0.4, "simpo": 0.05}
"""Share of the rate by objective. DPO and SimPO move a model with steps that would not teach it a text: published runs of
7 B took 5e-7 with DPO (Tunstall et al. 2023, §5.1), with adapters 5e-6, and 3e-7 to 1e-6 with SimPO (Meng et al. 2024).
ORPO also teaches the text: its authors trained 7 B with 5e-6 and 8e-6 (Hong et al. 2024)."""
DECAY, FINE_TUNING_DECAY = 0.1, 0.01
"""AdamW's weight decay, from scratch and of trained weights; adapters have none. The product of rate and decay, the
share of a weight that a step subtracts, is the same for every optimizer (Chen et al. 2023, §5)."""
EXPERT_BALANCE = 0.01
"""The weight of the loss that spreads tokens over experts (Fedus et al. 2022, §2.2; Muennighoff et al. 2024, table 1).
Weights that were trained before get none, as by default in transformers."""
WARMUP, FINE_TUNING_WARMUP, MOST_WARMUP = 0.1, 0.03, 2_000
"""The share of a run's steps that warms up, from scratch and for trained weights, and the most steps of warm-up."""


def learning_rate(plan: Plan) -> float:
    """The plan's peak learning rate before it is scaled with the batch. Raises `PlanError` if the model is not found."""
    given = plan.train.learning_rate
    if given is not None:
        return given
    return _rounded(_adamw_rate(plan) * OPTIMIZER_FACTORS[plan.optimize.optimizer])


def peak_learning_rate(plan: Plan) -> float:
    """The rate at the end of the warm-up, scaled with the effective batch where the plan says so: linearly
    (Goyal et al. 2017, §2.1) or by its root (Krizhevsky 2014, §3)."""
    t = plan.train
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[t.scale_learning_rate]
    return learning_rate(plan) * math.pow(plan.effective_batch / t.reference_batch, power)


def weight_decay(plan: Plan) -> float:
    """The plan's decay of matrices and embeddings."""
    given = plan.train.weight_decay
    if given is not None:
        return given
    if plan.optimize.lora_rank:
        return 0.0
    share = FINE_TUNING_DECAY / DECAY if _trained_before(plan) else 1.0
    return _rounded(share * most_decay(plan.optimize.optimizer))


def expert_balance(plan: Plan) -> float | None:
    """The weight of the plan's loss that spreads tokens over experts; None if the model has none."""
    model, given = catalog.model(plan), plan.train.expert_balance
    if not isinstance(model, Architecture) or not model.experts:
        return given
    if given is not None:
        return given
    return 0.0 if _trained_before(plan) else EXPERT_BALANCE


def most_decay(optimizer: OptimizerName) -> float:
    """The decay with `optimizer` of weights that are trained from scratch."""
    return _rounded(DECAY / OPTIMIZER_FACTORS[optimizer])


def decays(plan: Plan) -> bool:
    """Whether the plan has any weight decay."""
    given = plan.train.weight_decay
    return not plan.optimize.lora_rank if given is None else given > 0


_BY_RECIPE: dict[str, Callable[[Plan], float | None]] = {
    "train.learning_rate": learning_rate,
    "train.weight_decay": weight_decay,
    "train.expert_balance": expert_balance,
}
"""The settings that get their number from the recipe before a run begins. The warm-up follows the run's number of steps."""


def warmup_steps(plan: Plan, total_steps: int) -> int:
    """Steps of linear warm-up in a run of `total_steps`.

    A number of steps that is more than half of the run becomes a tenth of it.
    """
    t = plan.train
    if t.warmup_steps is not None:
        wanted = t.warmup_steps
        return wanted if 2 * wanted <= total_steps else total_steps // 10
    if t.warmup_ratio is not None:
        return round(t.warmup_ratio * total_steps)
    return min(round(_warmup_share(plan) * total_steps), MOST_WARMUP)


def settings_by_recipe(plan: Plan) -> frozenset[str]:
    """The settings that `plan` leaves open and `with_recipe` gives numbers."""
    return frozenset(
        key
        for key, number in _BY_RECIPE.items()
        if get(plan, key) is None and number(plan) is not None
    )


def with_recipe(plan: Plan) -> Plan:
    """`plan` with its rate and decay as numbers, so that a run keeps them. Raises `PlanError`."""
    return replace(plan, {key: number(plan) for key, number in _BY_RECIPE.items()})


def kept_rate(before: Plan, after: Plan) -> str:
    """A sentence saying that `after` keeps the rate that a person set for the optimizer of `before`; empty if it does not,
    or if the recipe has the same rate for both optimizers. Raises `PlanError` if the model is not found."""
    given, new = after.train.learning_rate, after.optimize.optimizer
    old = before.optimize.optimizer
    if given is None or OPTIMIZER_FACTORS[old] == OPTIMIZER_FACTORS[new]:
        return ""
    own = learning_rate(replace(after, {"train.learning_rate": None}))
    return (
        f"train.learning_rate stays {given:g}, as set for {old}; for {new} the recipe has {own:g} "
        "(train.learning_rate = none takes it)"
    )


def words(plan: Plan, by_recipe: Collection[str] = (), total_steps: int | None = None) -> str:
    """Learning rate, warm-up and weight decay in words, and what the recipe derived the unset ones from. `by_recipe` are
    the keys of a run's plan whose numbers the recipe chose; `total_steps` those of the run, if known. Raises `PlanError`."""
    unset = settings_by_recipe(plan) | set(by_recipe)
    unset_warmup = plan.train.warmup_steps is None and plan.train.warmup_ratio is None
    balance = expert_balance(plan)
    phrases = [
        (f"learning rate {learning_rate(plan):g}", "train.learning_rate" in unset),
        (f"weight decay {weight_decay(plan):g}", "train.weight_decay" in unset),
        (f"warm-up {_warmup_words(plan, total_steps)}", unset_warmup),
    ]
    if balance is not None:
        phrases.append((f"expert balance {balance:g}", "train.expert_balance" in unset))
    derived = [phrase for phrase, is_derived in phrases if is_derived]
    given = [phrase for phrase, is_derived in phrases if not is_derived]
    if not derived:
        return "; ".join(given)
    as_set = f"; as set: {'; '.join(given)}" if given else ""
    return f"{'; '.join(derived)}: {_derived_from(plan)}{as_set}"


def _warmup_words(plan: Plan, total_steps: int | None) -> str:
    """The length of the warm-up in words."""
    t = plan.train
    if t.warmup_steps is not None:
        steps = t.warmup_steps if total_steps is None else warmup_steps(plan, total_steps)
        if steps == t.warmup_steps:
            return f"{steps:,} steps"
        reason = f"train.warmup_steps = {t.warmup_steps:,} is more than half of the run"
        return f"{steps:,} steps, since {reason}"
    if t.warmup_ratio is not None:
        return f"{100 * t.warmup_ratio:.3g}% of the steps"
    return f"{_warmup_share(plan):.0%} of the steps, {MOST_WARMUP:,} at most"


def _derived_from(plan: Plan) -> str:
    """What the recipe derives its numbers from, in words."""
    parameters = format_count(_parameters(catalog.model(plan)))
    start = "trained before" if _trained_before(plan) else "from scratch"
    rank = plan.optimize.lora_rank
    adapters = f", LoRA rank {rank}" if rank else ""
    objective = f", {plan.objective_name}" if plan.learns_pairs else ""
    return f"for {parameters} parameters {start}, {plan.optimize.optimizer}{adapters}{objective}"


def _adamw_rate(plan: Plan) -> float:
    """AdamW's rate for the plan's model. A model below `SMALL_MODEL_PARAMETERS` takes `SMALL_MODEL_RATE`."""
    parameters = max(_parameters(catalog.model(plan)), SMALL_MODEL_PARAMETERS)
    rate = SMALL_MODEL_RATE * math.pow(parameters / SMALL_MODEL_PARAMETERS, RATE_EXPONENT)
    rate *= OBJECTIVE_FACTORS.get(plan.train.objective, 1.0)
    whole_model = not plan.optimize.lora_rank
    return rate * (FINE_TUNING_FACTOR if whole_model and _trained_before(plan) else 1.0)


def _warmup_share(plan: Plan) -> float:
    return FINE_TUNING_WARMUP if plan.optimize.lora_rank or _trained_before(plan) else WARMUP


def _trained_before(plan: Plan) -> bool:
    """Whether training starts from trained weights. A model that is not found counts as new."""
    return shortly(plan) in (FINE_TUNES, FROM_RUN)


@lru_cache(maxsize=256)
def _parameters(model: Model) -> int:
    return sum(p.size for p in model.parameters())


def _rounded(number: float) -> float:
    """Two digits, as a person would write it."""
    return float(f"{number:.1e}")
