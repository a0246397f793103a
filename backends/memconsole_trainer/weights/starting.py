"""The initial weights of a plan: from the model's directory, or random."""

from __future__ import annotations

from pathlib import Path

from memconsole.plan import catalog
from memconsole.plan.architecture import Architecture
from memconsole.plan.model import Model
from memconsole.plan.plan import Plan
from memconsole_trainer.engine import WeightSource
from memconsole_trainer.weights.huggingface import HuggingFaceWeights, has_weights
from memconsole_trainer.weights.initialize import InitialWeights


def weights_directory(plan: Plan) -> Path | None:
    """The directory of the plan's model, if it has one."""
    found = catalog.model_directory(plan)
    return Path(found) if found else None


def starting_weights(plan: Plan, model: Model) -> WeightSource:
    """The weights in the model's directory if it has any, else random ones from the plan's seed.

    Raises `WeightsError`.
    """
    directory = weights_directory(plan)
    if directory is not None and has_weights(directory):
        assert isinstance(model, Architecture)
        return HuggingFaceWeights(directory, model)
    return InitialWeights(model, plan.train.seed)
