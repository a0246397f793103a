"""Dropout around the layers of a plain model; see `memconsole_trainer.techniques.dropout`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from memconsole.plan.plan import Plan
from memconsole_torch.models.decoder import Attention
from memconsole_torch.models.linear import compute_dtype
from memconsole_torch.models.operator import operator
from memconsole_torch.models.regressor import Regressor
from memconsole_torch.techniques.weights.lora import Adapted
from memconsole_trainer.techniques.dropout import drops, key_of


@operator("dropped", "(Tensor x, int key, float rate) -> Tensor")
def dropped(x: Tensor, key: int, rate: float) -> Tensor:
    """x with numbers dropped at `rate`, by the mask of `key`. The gradient is dropped by the same mask."""
    return (x * kept(x, key, rate)).div_(1.0 - rate)


def kept(x: Tensor, key: int, rate: float) -> Tensor:
    """The mask of `key`, in the shape of x: which numbers are not dropped."""
    generator = torch.Generator(device=x.device).manual_seed(key)
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    return mask.bernoulli_(1.0 - rate, generator=generator)


@dropped.register_fake
def _(x: Tensor, key: int, rate: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.key, ctx.rate = inputs


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return dropped(gradient, ctx.key, ctx.rate), None, None


dropped.register_autograd(_backward, setup_context=_keep)
OPERATOR = dropped.overload


def workspace(x: Tensor, *rest: Any) -> list[int]:
    """Bytes that the operator allocates in addition to its result: the mask."""
    return [x.numel()]


class Draws:
    """The dropout state of one module: the micro-batch that is trained, or that nothing is dropped now."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rank = distributed.get_rank() if distributed.is_initialized() else 0
        self._now: tuple[int, int] | None = None

    @contextmanager
    def of(self, step: int, micro_batch: int) -> Iterator[None]:
        """A context in which numbers are dropped, forward and backward."""
        self._now = step, micro_batch
        try:
            yield
        finally:
            self._now = None

    def key(self, place: int) -> int | None:
        """The key of a place's mask; None if nothing is dropped now."""
        return None if self._now is None else key_of(self._seed, *self._now, place, self._rank)


class Place:
    """Drops the numbers that pass one place of a model."""

    def __init__(self, draws: Draws, place: int, rate: float) -> None:
        self._draws, self._place, self._rate = draws, place, rate

    def __call__(self, x: Tensor) -> Tensor:
        key = self._draws.key(self._place)
        return x if key is None else dropped(x, key, self._rate)

    def hook(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """A forward hook that drops from a module's output."""
        return self(output)

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """``dropped(x) @ matrix.T``, which keeps x alone for its backward pass."""
        key = self._draws.key(self._place)
        if key is None:
            return F.linear(x, matrix)
        found: Tensor = _Product.apply(x.to(compute_dtype(x)), matrix, key, self._rate)
        return found

    def attention(self) -> tuple[int, float] | None:
        """Key and rate of dropout on the attention weights; None if nothing is dropped now."""
        key = self._draws.key(self._place)
        return None if key is None else (key, self._rate)


class _Product(torch.autograd.Function):
    """The first product of an adapter. The input after dropout is recomputed in the backward pass: adapters that read
    the same input have different masks, so each would keep its own copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, key: int, rate: float) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.key, ctx.rate = key, rate
        return F.linear(dropped(x, key, rate), matrix.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, matrix = ctx.saved_tensors
        rows = dropped(x, ctx.key, ctx.rate).flatten(0, -2)
        by_matrix = (gradient.flatten(0, -2).mT @ rows).to(matrix.dtype)
        del rows
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = dropped(gradient @ matrix.to(gradient.dtype), ctx.key, ctx.rate)
        return by_x, by_matrix, None, None


def apply(plan: Plan, module: nn.Module) -> Draws | None:
    """Apply the dropout of `plan` to a model. Returns None if the plan has no dropout."""
    if not drops(plan):
        return None
    t, draws, places = plan.train, Draws(plan.train.seed), iter(range(2**31))
    if t.dropout:
        embed, first = module.embed, Place(draws, next(places), t.dropout)
        module.embed = lambda *arguments, **named: first(embed(*arguments, **named))
        suffix = "" if isinstance(module, Regressor) else "_post_norm"
        for block in module.layers:  # type: ignore[union-attr,unused-ignore]
            for name in ("attention", "mlp"):  # what is added to the residual stream
                added = block.get_submodule(name + suffix)
                added.register_forward_hook(Place(draws, next(places), t.dropout).hook)
    for layer in module.modules():
        if isinstance(layer, Attention) and t.attention_dropout:
            layer.dropout = Place(draws, next(places), t.attention_dropout).attention
        if isinstance(layer, Adapted) and plan.optimize.lora_dropout:
            layer.reduce = Place(draws, next(places), plan.optimize.lora_dropout).product
    return draws
