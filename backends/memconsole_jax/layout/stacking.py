"""Maps canonical per-layer names to this backend's arrays, which are stacked over layers.

``layers.3.mlp.up.weight`` is row 3 of the array ``layers.mlp.up.weight``; other names are
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.model import Model, Parameter
from memconsole_trainer.engine import WeightsError
from memconsole_trainer.jumps import group_of


@dataclass(frozen=True)
class Stack:
    """One array of the model: the same weight of all layers, or one weight outside the layers."""

    name: str
    members: tuple[Parameter, ...]
    """Canonical parameters in layer order."""
    layered: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.members[0].shape
        return (len(self.members), *shape) if self.layered else shape

    @property
    def used(self) -> bool:
        """Whether the loss depends on it."""
        return self.members[0].used

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it."""
        return self.members[0].decays

    def layer(self, index: int) -> Stack:
        """The stack of one layer, an array (1, …)."""
        return Stack(self.name, self.members[index : index + 1], self.layered)

    def gather(self, tensor: Callable[[str], NDArray[np.generic]]) -> NDArray[np.float32]:
        """Make the float32 array on the host, one canonical tensor at a time."""
        array = np.empty(self.shape, dtype=np.float32)
        for row, parameter in zip(self._rows(array), self.members, strict=True):
            values = tensor(parameter.name)
            if values.shape != parameter.shape:
                raise WeightsError(
                    f"{parameter.name}: shape {values.shape}, expected {parameter.shape}"
                )
            row[...] = values
        return array

    def names(self) -> Iterator[str]:
        """The canonical names in the order of `split`."""
        return (parameter.name for parameter in self.members)

    def split(self, array: NDArray[np.generic]) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield each canonical name and its part of `array`, a view."""
        for row, parameter in zip(self._rows(array), self.members, strict=True):
            yield parameter.name, row

    def _rows(self, array: NDArray) -> Iterator[NDArray]:
        return iter(array) if self.layered else iter((array,))


def stacks(model: Model) -> dict[str, Stack]:
    """Every array of the model by stacked name, in the order of the canonical parameters."""
    return stacked(model.parameters())


def stacked(parameters: Iterable[Parameter]) -> dict[str, Stack]:
    """The arrays that hold these parameters, by stacked name."""
    members: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        members.setdefault(group_of(parameter), []).append(parameter)
    return {n: Stack(n, tuple(m), m[0].layer is not None) for n, m in members.items()}
