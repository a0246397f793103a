"""Tries a jump: chooses its length with one half of a batch, and confirms it with the other half."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memconsole_trainer.control.confirm import is_confirmed
from memconsole_trainer.control.halves import halves
from memconsole_trainer.engine import Batch
from memconsole_trainer.host import heap
from memconsole_trainer.jumps import JumpingEngine, Path

SCALES = (0.5, 1.0, 2.0)
"""Multiples of the predicted path that are tried."""


@dataclass(frozen=True)
class JumpTrial:
    """The best scale of the path, and the decreases of the mean loss with it."""

    scale: float
    predicted: float
    """The decrease on the half of the batch that chose the scale; 0 if no scale lowers its loss."""
    actual: float
    """The decrease on the other half."""
    accepted: bool
    loss: float
    """Summed loss of the batch with the weights that stay."""
    forwards: float
    """Forward passes of whole batches that the trial took."""


def try_jump(engine: JumpingEngine, batch: Batch, path: Path) -> JumpTrial:
    """Move the weights by the best scale of the path for one half of the batch, if the other half confirms it."""
    jumps = engine.jumps
    first, second = halves(batch)
    jumps.begin(path)
    losses = {}
    for scale in (0.0, *SCALES):
        trim_heap(engine)
        losses[scale] = jumps.loss(first, scale)
    unmoved = losses.pop(0.0)
    finite = {scale: loss for scale, loss in losses.items() if math.isfinite(loss)}
    best = min(finite, key=finite.__getitem__, default=0.0)
    predicted = (unmoved - finite[best]) / max(1.0, first.weight) if best else 0.0
    predicted = predicted if math.isfinite(predicted) else 0.0
    trim_heap(engine)
    before = jumps.losses(second, 0.0)
    after = jumps.losses(second, best) if predicted > 0 else before
    weight = max(1.0, second.weight)
    decrease, accepted = is_confirmed(before, after, predicted * weight)
    jumps.end(best if accepted else 0.0)
    loss = finite[best] + after.sum() if accepted else unmoved + before.sum()
    half_forwards = 2 + len(SCALES) + (predicted > 0)
    return JumpTrial(best, predicted, decrease / weight, accepted, float(loss), half_forwards / 2)


def trim_heap(engine: JumpingEngine) -> None:
    """Return the free memory of a CPU's heap to the system. What a jump frees is spread over the gaps that the arrays of
    steps left."""
    if engine.device.kind == "cpu":
        heap.trim()
