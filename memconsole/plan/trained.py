"""Which weights of a model a plan keeps frozen. Prices and both backends ask here."""

from __future__ import annotations

from functools import lru_cache

from memconsole.plan.models.model import Model
from memconsole.plan.sections import Plan
from memconsole.plan.tasks import task_of_model


def frozen_names(plan: Plan, model: Model) -> tuple[str, ...]:
    """The names of the weights that are used or saved but not trained, in the order of the model.

    Empty if the task trains every weight that the loss depends on. Adapters are no weights of the
    model: with them, all weights of the model are frozen.
    """
    trained = task_of_model(model).trained(plan, model)
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
