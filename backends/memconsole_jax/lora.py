"""LoRA on a frozen base, applied to the matrices of a plain decoder; see `memconsole_trainer.adapters`.

Adapters are the trained arrays, the base the kept ones: only adapters are differentiated, have
optimizer state and are donated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax import Array

from memconsole.plan.architecture import Architecture
from memconsole_jax.decoder import Decoder, Linear, assemble, product, recomputed
from memconsole_trainer.adapters import SCALE

_A, _B = ".lora_a", ".lora_b"


class Adapted(nnx.Module):
    """A linear layer with an adapter beside it: ``base(x) + 2 (x @ A.T) @ B.T``, in the dtype of x."""

    def __init__(self, base: Linear, a: Array, b: Array) -> None:
        self.base = base
        self.lora_a = nnx.Param(a)
        self.lora_b = nnx.Param(b)

    def __call__(self, x: Array) -> Array:
        low = recomputed(product, x, self.lora_a[...]) * SCALE
        return self.base(x) + recomputed(product, low, self.lora_b[...])


def assembled(a: Architecture, weights: Mapping[str, Any]) -> Decoder:
    """`decoder.assemble`, with the adapters among `weights`, if any, beside their matrices."""
    decoder = assemble(a, weights)
    for name in weights:
        if name.endswith(_A):
            *path, last = name.removesuffix(_A).split(".")
            parent = functools.reduce(getattr, path, decoder)
            b = weights[name.removesuffix(_A) + _B]
            setattr(parent, last, Adapted(getattr(parent, last), weights[name], b))
    return decoder
