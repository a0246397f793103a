"""LoRA on a frozen base, applied to the matrices of a plain decoder; see
`memconsole_trainer.techniques.adapters`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.models.model import STORED_MATRICES, Parameter
from memconsole.plan.plan import BaseStorage, Plan
from memconsole.plan.training.trained import adapter_scale, has_adapter
from memconsole_torch.models import pretrained
from memconsole_torch.models.decoder import Decoder
from memconsole_torch.models.linear import linear
from memconsole_torch.techniques.weights.precision import COMPUTE
from memconsole_torch.techniques.weights.quantized_base import (
    QuantizedLinear,
    QuantizedStack,
    product,
    register_codes,
)
from memconsole_trainer.engine import WeightSource
from memconsole_trainer.techniques.adapters import InitialAdapters, adapters_of, stored_narrow
from memconsole_trainer.techniques.base_storage import is_quantized, parts


class Adapted(nn.Module):
    """A linear layer plus an adapter: x Wᵀ + b + scale · (x Aᵀ) Bᵀ, in the compute precision.

    It takes over the layer's parameters and their names. For the adapter's backward pass it keeps x Aᵀ
    (..., rank) and the input x, one tensor for all matrices that read it.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.reduce: Callable[[Tensor, Tensor], Tensor] = F.linear
        """Computes x Aᵀ; dropout replaces this function."""
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(linear.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        low = self.reduce(x, self.lora_a) * self.scale
        return self.frozen(x) + F.linear(low, self.lora_b)

    def frozen(self, x: Tensor) -> Tensor:
        """The layer without its adapter."""
        return linear(x, self.weight, self.bias)


class QuantizedAdapted(Adapted):
    """An `Adapted` layer whose matrix is stored as codes, named `weight`, and scales. Both are
    buffers."""

    weight_scales: Tensor

    def __init__(self, linear: nn.Linear, rank: int, scale: float, storage: BaseStorage) -> None:
        super().__init__(linear, rank, scale)
        self.shape = linear.out_features, linear.in_features
        del self.weight
        register_codes(self, linear, storage)

    def frozen(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.weight_scales, self.bias, self.shape)


def load(
    plan: Plan,
    architecture: Architecture,
    weights: WeightSource,
    device: torch.device,
    change: Callable[[nn.Module], None],
) -> Decoder:
    """A decoder on `device` with a frozen base of `weights` and new adapters. `change` is called
    with it before it is allocated."""

    def adapt(decoder: Decoder) -> None:
        _adapt(plan, decoder)
        change(decoder)

    decoder = pretrained.load(
        architecture,
        partial(Decoder, architecture),
        weights,
        device,
        adapt,
        partial(parts, plan),
    )
    own, new = dict(decoder.named_parameters()), InitialAdapters(plan, architecture)
    for p in adapters_of(plan, architecture):
        pretrained.copy_into(own[p.name], new.tensor(p.name), p.name)
    return decoder


def _adapt(plan: Plan, decoder: Decoder) -> None:
    """Freeze `decoder`, set the storage type of its weights, and add adapters to its matrices."""
    own = dict(decoder.named_parameters())
    for p in parameters(decoder.architecture):
        own[p.name].requires_grad_(False)
        if stored_narrow(plan, p):
            own[p.name].data = own[p.name].data.to(COMPUTE[plan.optimize.precision])
        if p.role in STORED_MATRICES:
            parent, _, name = p.name.removesuffix(".weight").rpartition(".")
            module = decoder.get_submodule(parent)
            setattr(module, name, _layer(plan, p, getattr(module, name)))


def _layer(plan: Plan, p: Parameter, linear: nn.Linear) -> nn.Module:
    """The module that replaces a frozen layer."""
    o, quantized = plan.optimize, is_quantized(plan, p)
    if not has_adapter(p, o.lora_targets):
        kind = QuantizedStack if p.role == "experts" else QuantizedLinear
        return kind(linear, o.base_storage) if quantized else linear
    scale = adapter_scale(plan)
    if quantized:
        return QuantizedAdapted(linear, o.lora_rank, scale, o.base_storage)
    return Adapted(linear, o.lora_rank, scale)
