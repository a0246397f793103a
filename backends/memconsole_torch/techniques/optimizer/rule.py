"""The interface of all update rules (`Rule`), what this project's rules have in common, and the two rules that use torch's
fused kernels.

`torch.optim.Optimizer` imports torch's compiler when the first rule is made, which takes a second or
two and 100 MB. The rules here need none of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class Rule(Protocol):
    """An update rule over groups of weights: one of ours, or one of `torch.optim`."""

    param_groups: Any
    """A dictionary for each group: its weights (`params`) and its settings."""
    state: Any
    """The state of each weight: tensors by name."""
    defaults: Any
    """Default settings of the groups."""

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class BaseRule:
    """What this project's rules have in common: groups and state, as `torch.optim.Optimizer` keeps them."""

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self.defaults = defaults
        self.param_groups = [defaults | group for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    def step(self) -> None:
        """One update of every weight that has a gradient."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or fill them with zeros."""
        for group in self.param_groups:
            for p in group["params"]:
                if set_to_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.zero_()

    def _with_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        return [p for p in group["params"] if p.grad is not None]

    def _slot(self, weights: Iterable[Tensor], name: str) -> list[Tensor]:
        return [self.state[p][name] for p in weights]


class Fused(BaseRule):
    """A rule that one kernel of torch computes for each group. A step whose `live` is 0 changes nothing (see `optimizers`)."""

    @torch.no_grad()
    def step(self) -> None:
        """One update, by one kernel for each group."""
        for group in self.param_groups:
            weights = self._with_gradients(group)
            if weights:
                self._update(group, weights, [p.grad for p in weights], _skipped(group))

    def _update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor | None],
        skipped: Tensor | None,
    ) -> None:
        raise NotImplementedError


class FusedAdamW(Fused):
    """The same computation and state as `torch.optim.AdamW(fused=True)`."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], betas: tuple[float, float], epsilon: float
    ) -> None:
        settings = {"lr": 0.0, "betas": betas, "eps": epsilon, "weight_decay": 0.0, "live": 1.0}
        super().__init__(groups, settings)

    def _update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor | None],
        skipped: Tensor | None,
    ) -> None:
        counts = self._slot(weights, "step")
        torch._foreach_add_(counts, 1)
        torch._fused_adamw_(
            weights,
            gradients,
            self._slot(weights, "exp_avg"),
            self._slot(weights, "exp_avg_sq"),
            [],
            counts,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=skipped,
        )
        if skipped is not None:
            torch._foreach_sub_(counts, [skipped] * len(counts))


class FusedSGD(Fused):
    """The same computation and state as `torch.optim.SGD(fused=True)`."""

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float) -> None:
        settings = {"lr": 0.0, "momentum": momentum, "weight_decay": 0.0, "live": 1.0}
        super().__init__(groups, settings)

    def _update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor | None],
        skipped: Tensor | None,
    ) -> None:
        momentum = group["momentum"]
        torch._fused_sgd_(
            weights,
            gradients,
            self._slot(weights, "momentum_buffer") if momentum else [],
            weight_decay=group["weight_decay"],
            momentum=momentum,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=skipped,
        )


def _skipped(group: dict[str, Any]) -> Tensor | None:
    """A device scalar, 1 in a step to be skipped and else 0. None if the rule never skips a step."""
    live = group["live"]
    return 1 - live if isinstance(live, Tensor) else None
