"""Updates each weight inside the backward pass, as soon as its gradient is complete, then frees the
gradient.

So the gradients never all exist at once. Accumulation and clipping by the global norm need all of
them, so a plan may not combine these with it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from memconsole_torch.techniques.optimizer.optimizers import CombinedOptimizer
from memconsole_torch.techniques.optimizer.rule import Rule
from memconsole_torch.techniques.weights.rounding import norm_of


class InBackward:
    """The hooks of one model's weights, each of which has an optimizer of its own."""

    def __init__(self, optimizer: CombinedOptimizer) -> None:
        self._optimizer = optimizer
        self._norms: list[Tensor] = []
        for part in optimizer.parts:
            (weight,) = (p for group in part.param_groups for p in group["params"])
            weight.register_post_accumulate_grad_hook(partial(self._update, part))

    def _update(self, part: Rule, weight: nn.Parameter) -> None:
        assert weight.grad is not None
        self._norms.append(norm_of([weight.grad]))
        self._optimizer.update(part)
        weight.grad = None

    def take_norm(self) -> Tensor:
        """The global norm of the gradients since the last call, a device scalar."""
        norms, self._norms = self._norms, []
        return torch.linalg.vector_norm(torch.stack(norms))

    def drop_norms(self) -> None:
        """Forget the gradients since the last call of `take_norm`."""
        self._norms.clear()
