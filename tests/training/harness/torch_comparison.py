"""Outputs and gradients of a model on the CPU, for comparing backends."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole_torch import tasks
from memconsole_torch.models import pretrained
from memconsole_torch.tasks.task import MicroBatch, Task
from memconsole_trainer.engine import Array, Batch, WeightSource

Floats = NDArray[np.float32]


def outputs(model: Model, weights: WeightSource, arrays: Mapping[str, Array]) -> Floats:
    """The model's fp32 outputs for the arrays of one micro-batch."""
    task, module = _made(model, weights)
    with torch.no_grad():
        found: Floats = task.outputs(module, _rows(arrays)).numpy()
    return found


def logits(
    architecture: Architecture,
    weights: WeightSource,
    tokens: NDArray[np.int32],
    documents: NDArray[np.int32] | None = None,
) -> Floats:
    """fp32 logits (B, T, V) of `tokens` (B, T)."""
    arrays = {"inputs": tokens} | ({} if documents is None else {"documents": documents})
    return outputs(architecture, weights, arrays)


def gradients(model: Model, weights: WeightSource, batch: Batch) -> dict[str, Floats]:
    """fp32 gradients of the batch's mean loss, by canonical name. Weights that no term of it reaches are left out."""
    task, module = _made(model, weights)
    for arrays in batch.micro_batches():
        task.loss(module, _rows(arrays), 1 / batch.weight).backward()
    own = dict(module.named_parameters())
    return {p.name: own[p.name].grad.numpy() for p in model.parameters() if p.used}


def _made(model: Model, weights: WeightSource) -> tuple[Task, nn.Module]:
    task = tasks.of(Plan(), model)
    return task, pretrained.load(model, task.module, weights, torch.device("cpu"))


def _rows(arrays: Mapping[str, Array]) -> MicroBatch:
    return MicroBatch(arrays, torch.from_numpy)
