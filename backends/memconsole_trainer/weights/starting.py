"""The initial weights of a plan: from the model's directory, or random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.files import has_weights
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender, is_of_decoder
from memconsole.plan.origin import RANDOM
from memconsole.plan.plan import Plan
from memconsole_trainer.engine import WeightSource
from memconsole_trainer.weights.huggingface import HuggingFaceWeights
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
    new = InitialWeights(model, plan.train.seed)
    if directory is None or plan.model.weights == RANDOM or not has_weights(directory):
        return new
    if isinstance(model, Recommender):
        return _Around(model, HuggingFaceWeights(directory, model.decoder), new)
    assert isinstance(model, Architecture)
    return HuggingFaceWeights(directory, model)


class _Around:
    """The weights of a recommender with a loaded decoder: the others are new."""

    def __init__(self, model: Recommender, decoder: WeightSource, new: WeightSource) -> None:
        self._loaded = {p.name for p in model.parameters() if is_of_decoder(p)}
        self._decoder, self._new = decoder, new

    def tensor(self, name: str) -> NDArray[np.generic]:
        return (self._decoder if name in self._loaded else self._new).tensor(name)
