"""The protocol between a controller that predicts weights and a backend that moves them.

A jump is a predicted change of the weights along a path, instead of gradient steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.model import Parameter
from memconsole.plan.plan import Plan, Precision
from memconsole.plan.sections.hybrid import PhaseName
from memconsole_trainer.engine import Batch, Engine, Part, StateSource, WeightsError

PREFIX = "hybrid."
"""Prefix of the snapshots' tensors in a checkpoint."""
UPDATES = f"{PREFIX}updates"
"""Name of the tensor that counts the updates since the optimizer began."""
SHRINKAGE = 8.0
"""The square of 2.8: a weight moves only if its mean movement is larger than 2.8 standard errors."""
TINY = 1e-30
"""Added to squared means, so that none is 0."""
Pairs = Sequence[tuple[int, int]]
"""Numbers of two snapshots each: a movement of the weights leads from the first to the second."""


@dataclass(frozen=True)
class Path:
    """A direction in which weights may move: a weighted sum of earlier movements, shrunk where they are noise
    (`shrunk_sum`)."""

    pairs: Pairs
    shares: Mapping[str, NDArray[np.float64]]
    """The coefficient of each movement, (pairs,), by group of weights."""


class Jumps(Protocol):
    """Snapshots of an engine's trained weights, and jumps along a path between them.

    Snapshots are on the host, in bf16, numbered from 0, the oldest first. Groups are the names of
    weights without the number of their layer.
    """

    def snapshot(self) -> None:
        """Add a snapshot of the weights."""
        ...

    def forget(self, count: int) -> None:
        """Drop the `count` oldest snapshots."""
        ...

    def products(self, pairs: Pairs) -> dict[str, NDArray[np.float64]]:
        """The inner products of movements, (pairs, pairs), by group."""
        ...

    def begin(self, path: Path) -> None:
        """Prepare to try moves along `path`. Until `end`, the engine can do nothing else."""
        ...

    def loss(self, batch: Batch, scale: float) -> float:
        """The summed loss of `batch` with the weights moved by `scale` times the path, in the
        precision of predict phases and without gradients."""
        ...

    def losses(self, batch: Batch, scale: float) -> NDArray[np.float64]:
        """The summed loss of each group of rows of `batch` (`control.confirm.rows_of_group`), one after another."""
        ...

    def end(self, scale: float) -> None:
        """Move the weights by `scale` times the path. With 0 they are as before, bit for bit. Otherwise `undo` can
        restore the weights from before the first move since `settle`."""
        ...

    def undo(self) -> None:
        """Set the weights back to before the first move since `settle`, bit for bit."""
        ...

    def settle(self) -> None:
        """Forget the weights to which `undo` would set back."""
        ...

    def tensors(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """The snapshots as the tensors of a checkpoint."""
        ...


class JumpingEngine(Engine, Protocol):
    """An engine whose weights can be predicted."""

    jumps: Jumps

    def compute_in(self, precision: Precision) -> None:
        """Compute all further gradient steps in this precision, fp32 or bf16."""
        ...

    def count_step(self, loss: float) -> None:
        """Count a step that updated nothing, and report its mean `loss`."""
        ...

    def restart_average(self) -> None:
        """Set the moving average of the weights, if there is one, to the weights."""
        ...

    def fetch(self, part: Part) -> None:
        """Begin to bring a released `part` back, asynchronously. `restore` waits for it."""
        ...


def phase_precision(plan: Plan, phase: PhaseName) -> Precision:
    """The precision in which a phase computes."""
    own = plan.hybrid.precision_of(phase)
    return plan.optimize.precision if own == "same" else own


@dataclass(frozen=True)
class SavedSnapshots:
    """The snapshots that a checkpoint contains."""

    names: tuple[str, ...]
    snapshots: int
    before: bool
    """Whether it also contains the weights from before the first move since `settle`."""


def saved_snapshots(source: StateSource) -> SavedSnapshots:
    """The snapshots that `source` contains. Raises `WeightsError` if one is missing."""
    names = tuple(n for n in source.names() if n.startswith(PREFIX) and n != UPDATES)
    which = {name.removeprefix(PREFIX).partition(".")[0] for name in names}
    numbers = {int(word) for word in which if word.isdecimal()}
    if numbers != set(range(len(numbers))):
        raise WeightsError(f"the checkpoint lacks a weight snapshot before number {max(numbers)}")
    return SavedSnapshots(names, len(numbers), "before" in which)


def group_of(parameter: Parameter) -> str:
    """``layers.3.mlp.up.weight`` -> ``layers.mlp.up.weight``."""
    if parameter.layer is None:
        return parameter.name
    return parameter.name.replace(f"layers.{parameter.layer}.", "layers.", 1)


def shrunk_sum(movements: NDArray[np.float32], shares: NDArray[np.float64]) -> NDArray[np.float32]:
    """The sum (weights,) of movements (movements, weights) weighted by `shares`, shrunk to 0 for weights whose
    movements are noise.

    The factor of a weight is max(0, 1 - SHRINKAGE · squared standard error / squared mean) of its
    movements, as in James-Stein estimation (Efron and Morris 1973, positive part).
    """
    mean = movements.mean(axis=0)
    squared_error = movements.var(axis=0, ddof=1) / len(movements)
    factor = np.maximum(0, 1 - SHRINKAGE * squared_error / (mean * mean + TINY))
    summed: NDArray[np.float32] = shares.astype(np.float32) @ movements * factor
    return summed
