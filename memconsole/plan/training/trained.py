"""Which weights of a model a plan keeps frozen. Estimates and both backends use it."""

from __future__ import annotations

from functools import lru_cache

from memconsole.plan.models.model import Model, Parameter
from memconsole.plan.sections import Plan
from memconsole.plan.sections.optimize import LoraTargets
from memconsole.plan.tasks import task_for


def frozen_names(plan: Plan, model: Model) -> tuple[str, ...]:
    """The names of the weights that are used or saved but not trained, in the order of the model.

    Empty if the task trains every weight that the loss depends on. Adapters are no weights of the
    model: with them, all weights of the model are frozen.
    """
    trained = task_for(plan, model).trained(plan, model)
    names, used = _names(model)
    if len(trained) == used:
        return ()
    return _frozen(model, tuple(p.name for p in trained)) if trained else names


@lru_cache(maxsize=256)
def _names(model: Model) -> tuple[tuple[str, ...], int]:
    """All names, and how many of them the loss depends on."""
    weights = tuple(model.parameters())
    return tuple(p.name for p in weights), sum(p.used for p in weights)


@lru_cache(maxsize=256)
def _frozen(model: Model, trained: tuple[str, ...]) -> tuple[str, ...]:
    apart = frozenset(trained)
    return tuple(name for name in _names(model)[0] if name not in apart)


_ADAPTED: dict[LoraTargets, tuple[str, ...]] = {
    "all": (),
    "attention": ("attention.",),
    "query-value": ("attention.query.", "attention.value."),
    "mlp": ("mlp.",),
}
"""What the names of matrices with adapters contain, for each value of `optimize.lora_targets`."""


def has_adapter(parameter: Parameter, targets: LoraTargets) -> bool:
    """Whether a weight gets an adapter, if there are any: a matrix of a block that `targets` names."""
    if parameter.role != "matrix":
        return False
    return targets == "all" or any(part in parameter.name for part in _ADAPTED[targets])


def adapter_scale(plan: Plan) -> float:
    """alpha / rank, the factor of the adapters. Without a given alpha it is 2 for every rank, so that the learning rate
    need not change with the rank (Hu et al. 2021, §4.1 fixes alpha for the same reason)."""
    o = plan.optimize
    return 2.0 if o.lora_alpha is None or not o.lora_rank else o.lora_alpha / o.lora_rank
