"""LoRA on a frozen base, applied to the matrices of a plain decoder; see
`memconsole_trainer.techniques.adapters`.

Adapters are the trained arrays and the base the kept ones. So only adapters are differentiated,
have optimizer state and are donated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax import Array

from memconsole.plan.architecture import Architecture
from memconsole_jax.models.decoder import Decoder, assemble
from memconsole_jax.models.layers import Linear, product
from memconsole_jax.stacking import stacks
from memconsole_jax.techniques.quantized_base import QuantizedLinear
from memconsole_trainer.techniques.adapters import SCALE
from memconsole_trainer.techniques.base_storage import SCALES

_A, _B = ".lora_a", ".lora_b"


def is_adapter(name: str) -> bool:
    """Whether an array is one of an adapter's two matrices."""
    return name.endswith((_A, _B))


class Adapted(nnx.Module):
    """A linear layer plus an adapter: ``base(x) + 2 (x @ A.T) @ B.T``, in the dtype of x."""

    def __init__(self, base: Linear | QuantizedLinear, a: Array, b: Array) -> None:
        self.base = base
        self.lora_a = nnx.Param(a)
        self.lora_b = nnx.Param(b)

    def __call__(self, x: Array) -> Array:
        low = product(x, self.lora_a[...]) * SCALE
        return self.base(x) + product(low, self.lora_b[...])


def assembled(a: Architecture, weights: Mapping[str, Any]) -> Decoder:
    """`decoder.assemble`, plus the adapters in `weights`, if any. Matrices may be stored as
    codes."""
    decoder = assemble(a, weights)
    shapes = {name: stack.members[0].shape for name, stack in stacks(a).items()}
    for name in weights:
        if name.endswith(SCALES):
            weight = name.removesuffix(SCALES)
            rows, columns = shapes[weight]
            _replace(decoder, weight, QuantizedLinear, weights[name], (rows, columns))
    for name in weights:
        if name.endswith(_A):
            b = weights[name.removesuffix(_A) + _B]
            _replace(decoder, name, Adapted, weights[name], b)
    return decoder


def _replace(decoder: Decoder, name: str, kind: type, *arguments: Any) -> None:
    """Replace the layer that has the weight `name` by a layer of another `kind` that wraps it."""
    *path, last, _ = name.split(".")
    parent = functools.reduce(getattr, path, decoder)
    setattr(parent, last, kind(getattr(parent, last), *arguments))
