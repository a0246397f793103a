"""Loads a module's weights from their source to the device, as the plan stores them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.training.trained import frozen_names
from memconsole_torch.models import pretrained
from memconsole_torch.tasks.task import Task
from memconsole_torch.techniques.weights import lora, quantized_base, rounding
from memconsole_trainer.engine import WeightSource
from memconsole_trainer.techniques import adapters, base_storage


def load(
    plan: Plan,
    model: Model,
    task: Task,
    weights: WeightSource,
    device: torch.device,
    split: Callable[[nn.Module], None],
) -> nn.Module:
    """The module of `model` on `device` with `weights`, which passes one tensor at a time through
    the host. Only the parameters that the plan trains require gradients.

    `split` divides the weights of a module that has shapes only over the devices of a run.
    """
    frozen = frozen_names(plan, model)
    if plan.optimize.lora_rank:
        assert isinstance(model, Architecture)
        module: nn.Module = lora.load(plan, model, weights, device, split)
    else:

        def stored(module: nn.Module) -> None:
            rounding.set_storage_dtype(plan, frozen, module)
            quantized_base.apply(plan, module)
            split(module)

        parts = partial(base_storage.parts, plan)
        module = pretrained.load(model, task.module, weights, device, stored, parts)
    names = {p.name for p in adapters.trained_parameters(plan, model)}
    for name, p in module.named_parameters():
        p.requires_grad_(name in names)
    return module
