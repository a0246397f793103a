"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685): where they are, how they start, how they merge.

A matrix W (out, in) of attention or MLP in every block becomes W + (alpha / r) B A, with A (r, in)
and B (out, r). A starts normal with standard deviation
1/r and B starts at zero, so the initial model equals the base.

The base is frozen. With 16-bit compute its matrices and embeddings are stored in 16 bits and its
norms in fp32; adapters are always fp32. A checkpoint holds the adapters, the optimizer state and a
fingerprint of the base. The base itself is loaded from its original source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.model import Model, Parameter
from memconsole.plan.plan import Plan
from memconsole.plan.sections.optimize import LoraTargets
from memconsole.plan.tasks import task_for
from memconsole.plan.training.trained import adapter_scale, frozen_names, has_adapter
from memconsole_trainer.engine import WeightsError, WeightSource
from memconsole_trainer.randomness import drawn
from memconsole_trainer.techniques import base_storage

FINGERPRINT = "optimizer.base"
"""Name of the base's fingerprint in a checkpoint, uint8 (32,)."""


def adapters(model: Model, rank: int, targets: LoraTargets = "all") -> Iterator[Parameter]:
    """The adapters of the blocks' matrices, in the order of the matrices; none for rank 0."""
    for p in model.parameters() if rank else ():
        if has_adapter(p, targets):
            outputs, inputs = p.shape
            stem = p.name.removesuffix(".weight")
            yield Parameter(f"{stem}.lora_a", (rank, inputs), "adapter", p.layer, std=1 / rank)
            yield Parameter(f"{stem}.lora_b", (outputs, rank), "adapter", p.layer)


def adapters_of(plan: Plan, model: Model) -> Iterator[Parameter]:
    """The adapters that the plan adds to a model."""
    return adapters(model, plan.optimize.lora_rank, plan.optimize.lora_targets)


def trained_parameters(plan: Plan, model: Model) -> list[Parameter]:
    """The parameters the optimizer updates: the adapters if there are any, and the weights that the
    task trains."""
    own = task_for(plan, model).trained(plan, model)
    return [*adapters_of(plan, model), *own]


def stored_narrow(plan: Plan, parameter: Parameter) -> bool:
    """Whether this weight, if it is frozen, is rounded to 16 bits, and stored so if the backend
    computes in 16 bits."""
    return plan.optimize.precision != "fp32" and parameter.role not in ("norm", "bias")


class InitialAdapters:
    """A `WeightSource` of new adapters, each drawn from the plan's seed and its name."""

    def __init__(self, plan: Plan, model: Model) -> None:
        self._parameters = {p.name: p for p in adapters_of(plan, model)}
        self._seed = plan.train.seed

    def tensor(self, name: str) -> NDArray[np.float32]:
        return drawn(self._parameters[name], self._seed)


class Fingerprinted:
    """A `WeightSource` that stores a hash of each tensor of the `base` that it returns."""

    def __init__(self, source: WeightSource, base: Iterable[str]) -> None:
        self._source, self._base = source, frozenset(base)
        self._hashes: dict[str, bytes] = {}

    def tensor(self, name: str) -> NDArray[np.generic]:
        array = self._source.tensor(name)
        if name in self._base:
            self._hashes[name] = hashlib.sha256(np.ascontiguousarray(array).data).digest()
        return array

    def fingerprint(self) -> NDArray[np.uint8] | None:
        """Hash of the base's tensors returned so far, independent of their order; None if there is
        no base."""
        if not self._base:
            return None
        whole = hashlib.sha256()
        for name, digest in sorted(self._hashes.items()):
            whole.update(name.encode() + digest)
        return np.frombuffer(whole.digest(), np.uint8)


def check_base(found: NDArray[np.uint8] | None, stored: NDArray[np.generic]) -> None:
    """Raise `WeightsError` unless the base's fingerprint equals the one in the checkpoint."""
    if found is None or not np.array_equal(found, stored):
        raise WeightsError(
            "the base model's weights have changed since this checkpoint: "
            "what was trained belongs to other weights"
        )


class Merged:
    """A `WeightSource` of plain weights: the base in its storage precision plus the adapters, and
    the weights that are `trained`."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        base: WeightSource,
        trained: Callable[[str], NDArray[np.generic]],
    ) -> None:
        self._plan, self._base, self._trained = plan, base, trained
        self._frozen = frozenset(frozen_names(plan, model))
        self._parameters = {p.name: p for p in model.parameters()}

    def tensor(self, name: str) -> NDArray[np.generic]:
        """The merged tensor in fp32. Allocates no more than a few copies of it."""
        if name not in self._frozen:
            return self._trained(name)
        parameter = self._parameters[name]
        weight = np.asarray(self._base.tensor(name), dtype=np.float32)
        weight = base_storage.stored(self._plan, parameter, weight)
        if stored_narrow(self._plan, parameter):
            weight = narrow_rounded(self._plan, weight)
        o = self._plan.optimize
        if not o.lora_rank or not has_adapter(parameter, o.lora_targets):
            return weight
        stem = name.removesuffix(".weight")
        a, b = self._trained(f"{stem}.lora_a"), self._trained(f"{stem}.lora_b")
        return weight + np.float32(adapter_scale(self._plan)) * (
            np.asarray(b, np.float32) @ np.asarray(a, np.float32)
        )


def narrow_rounded(plan: Plan, array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round finite `array` to the plan's 16-bit type, still in float32. fp16 is clipped to its
    range."""
    if plan.optimize.precision != "fp16":
        return bf16_rounded(array)
    most = np.finfo(np.float16).max
    return np.clip(array, -most, most).astype(np.float16).astype(np.float32)


def bf16_rounded(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round finite `array` to bfloat16, half to even, still in float32."""
    bits = array.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)
