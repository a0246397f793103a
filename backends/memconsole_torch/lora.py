"""LoRA on a frozen base, applied to the matrices of a plain decoder; see `memconsole_trainer.adapters`."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memconsole.plan.architecture import Architecture, parameters
from memconsole.plan.plan import Plan
from memconsole_torch import pretrained
from memconsole_torch.decoder import Decoder
from memconsole_trainer.adapters import SCALE, InitialAdapters, adapters, stored_in_bf16
from memconsole_trainer.engine import WeightSource


class Adapted(nn.Module):
    """A linear layer with an adapter beside it: x Wᵀ + b + 2 (x Aᵀ) Bᵀ, in the compute precision.

    Takes over the layer's parameters under their names. Of the adapter, the backward pass keeps the
    input, which the next matrices keep too, and x Aᵀ (..., rank).
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(linear.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.lora_a) * SCALE
        return F.linear(x, self.weight, self.bias) + F.linear(low, self.lora_b)


def load(
    plan: Plan, architecture: Architecture, weights: WeightSource, device: torch.device
) -> Decoder:
    """A decoder on `device` whose base holds `weights`, frozen, and whose adapters start anew."""
    decoder = pretrained.load(architecture, weights, device, partial(_adapt, plan))
    own, new = dict(decoder.named_parameters()), InitialAdapters(plan, architecture)
    for p in adapters(architecture, plan.optimize.lora_rank):
        pretrained.copy_into(own[p.name], new.tensor(p.name), p.name)
    return decoder


def _adapt(plan: Plan, decoder: Decoder) -> None:
    """Freeze `decoder`, give its weights their storage type, and put adapters beside its matrices."""
    own = dict(decoder.named_parameters())
    for p in parameters(decoder.architecture):
        own[p.name].requires_grad_(False)
        if stored_in_bf16(plan, p):
            own[p.name].data = own[p.name].data.bfloat16()
        if p.role == "matrix":
            parent, _, name = p.name.removesuffix(".weight").rpartition(".")
            module = decoder.get_submodule(parent)
            setattr(module, name, Adapted(getattr(module, name), plan.optimize.lora_rank))
