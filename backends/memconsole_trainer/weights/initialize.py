"""Random initial weights, identical in every backend and on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.model import Model, Parameter
from memconsole_trainer.randomness import drawn


class InitialWeights:
    """A `WeightSource` in which each tensor depends only on the seed and its own name.

    Each tensor has its own Philox generator (Salmon et al., SC 2011) keyed by (seed, name). So a
    backend may read tensors in any order, and changing one layer's shape does not change the
    others.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self._parameters: dict[str, Parameter] = {p.name: p for p in model.parameters()}
        self._seed = seed

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The float32 tensor of `name`. Allocates nothing larger than the tensor itself.

        Raises KeyError for a name that the model does not have.
        """
        return drawn(self._parameters[name], self._seed)
