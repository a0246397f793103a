"""LoRA on a frozen base, applied to the matrices of a plain decoder; see
`memconsole_trainer.techniques.adapters`.

Adapters are the trained arrays and the base the frozen ones. So only adapters are differentiated,
have optimizer state and are donated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from flax import nnx
from jax import Array

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole_jax.layout.stacking import stacks
from memconsole_jax.models import dropout
from memconsole_jax.models.decoder import Decoder, assemble
from memconsole_jax.models.layers import Linear, product
from memconsole_jax.techniques.weights.quantized_base import QuantizedLinear
from memconsole_trainer.techniques.base_storage import SCALES

_A, _B = ".lora_a", ".lora_b"
M = TypeVar("M", bound=nnx.Module)


def is_adapter(name: str) -> bool:
    """Whether an array is one of an adapter's two matrices."""
    return name.endswith((_A, _B))


class Adapted(nnx.Module):
    """A linear layer plus an adapter: ``base(x) + scale · (x @ A.T) @ B.T``, in the dtype of x."""

    def __init__(self, base: Linear | QuantizedLinear, a: Array, b: Array, scale: float) -> None:
        self.base, self.scale = base, scale
        self.lora_a = nnx.Param(a)
        self.lora_b = nnx.Param(b)

    def __call__(self, x: Array) -> Array:
        low = dropout.adapter_product(x, self.lora_a[...], product) * self.scale
        return self.base(x) + product(low, self.lora_b[...])


def assembled(a: Architecture, weights: Mapping[str, Any], scale: float = 2.0) -> Decoder:
    """`decoder.assemble`, plus the adapters in `weights`, if any, times `scale`. Matrices may be
    stored as codes."""
    return equipped(assemble(a, weights), a, weights, scale)


def equipped(module: M, model: Model, weights: Mapping[str, Any], scale: float = 2.0) -> M:
    """`module` of `model` with the codes and adapters in `weights`, if any, times `scale`."""
    shapes = {name: stack.members[0].shape for name, stack in stacks(model).items()}
    for name in weights:
        if name.endswith(SCALES):
            weight = name.removesuffix(SCALES)
            rows, columns = shapes[weight]
            _replace(module, weight, QuantizedLinear, weights[name], (rows, columns))
    for name in weights:
        if name.endswith(_A):
            b = weights[name.removesuffix(_A) + _B]
            _replace(module, name, Adapted, weights[name], b, scale)
    return module


def _replace(module: nnx.Module, name: str, kind: type, *arguments: Any) -> None:
    """Replace the layer that has the weight `name` by a layer of another `kind` that wraps it."""
    *path, last, _ = name.split(".")
    parent = functools.reduce(getattr, path, module)
    setattr(parent, last, kind(getattr(parent, last), *arguments))
