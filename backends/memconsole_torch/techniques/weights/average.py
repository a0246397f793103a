"""The moving average of the trained weights, as `memconsole_trainer.techniques.average` specifies.

It is fp32 and on the device of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memconsole_torch.techniques.optimizer.optimizers import Weights
from memconsole_torch.techniques.optimizer.stochastic import CPU_SLICE, DEVICE_SLICE


class Average:
    """The averages of a module's trained weights."""

    def __init__(self, decoder: Weights, names: Iterable[str]) -> None:
        """`decoder` is a module, or the rows of its weights that this process holds."""
        own = dict(decoder.named_parameters())
        self._weights = {name: own[name] for name in names}
        self._averages = {
            name: nn.Parameter(w.detach().float().clone(), requires_grad=False)
            for name, w in self._weights.items()
        }
        of = {id(w): self._averages[name] for name, w in self._weights.items()}
        self._places = [
            (module._parameters, key, of[id(p)])
            for module in (decoder.modules() if isinstance(decoder, nn.Module) else ())
            for key, p in module._parameters.items()
            if id(p) in of
        ]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Canonical names and averages."""
        return iter(self._averages.items())

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the current weights."""
        for name, average in self._averages.items():
            average.copy_(self._weights[name])

    @torch.no_grad()
    def follow(self, share: float, live: Tensor | None = None) -> None:
        """Move the averages by `share` towards the current weights, unless `live`, a device scalar, is 0."""
        pairs = [(self._averages[name], w) for name, w in self._weights.items()]
        fp32_pairs = [(a, w) for a, w in pairs if w.dtype == torch.float32]
        if live is not None:
            for average, weight in fp32_pairs:
                average.lerp_(weight, live * share)
        elif fp32_pairs:
            torch._foreach_lerp_([a for a, _ in fp32_pairs], [w for _, w in fp32_pairs], share)
        for average, weight in pairs:
            # Training with bf16 weights never scales the loss, so no step is skipped.
            if weight.dtype != torch.float32:
                size = CPU_SLICE if weight.device.type == "cpu" else DEVICE_SLICE
                parts = zip(average.view(-1).split(size), weight.view(-1).split(size), strict=True)
                for target, part in parts:
                    target.lerp_(part.float(), share)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A context in which the module computes with the averages."""
        if not self._places:
            self._exchange()
            try:
                yield
            finally:
                self._exchange()
            return
        own = [parameters[key] for parameters, key, _ in self._places]
        try:
            for parameters, key, average in self._places:
                parameters[key] = average
            yield
        finally:
            for (parameters, key, _), weight in zip(self._places, own, strict=True):
                parameters[key] = weight

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the values of weights and averages."""
        for name, average in self._averages.items():
            weight = self._weights[name]
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)
