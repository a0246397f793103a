"""The sums of gradients that autograd makes in place.

Where a tensor is used twice, its gradients are added up. Autograd adds the second to the first in place if nothing else
holds the first (PyTorch, input_buffer.cpp, can_accumulate_inplace). While a dispatch mode is active it makes a third
tensor instead, so a trace sees an addition that a real step does not make.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ADD = torch.ops.aten.add.Tensor


def in_place(func: Any, args: tuple[Any, ...], caller: Any) -> bool:
    """Whether an operator, called from the frame `caller`, is such a sum. If so, its first argument holds the result."""
    if func is not ADD or not _by_autograd(caller):
        return False
    first, second = args
    return (
        isinstance(second, torch.Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and _is_dense(first)
        and _references(first) == sole_references()
    )


def _by_autograd(caller: Any) -> bool:
    """Whether the engine of the backward pass itself called an operator, and no function written in Python."""
    return caller.f_code.co_name == "_engine_run_backward" and not torch.is_grad_enabled()


def _is_dense(tensor: torch.Tensor) -> bool:
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sides) == tensor.numel()


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """The references to a tensor and to its storage, with those that this count takes."""
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)


@cache
def sole_references() -> tuple[int, int]:
    """The references to a gradient that only autograd holds, measured in a small backward pass. Call it before any mode is
    active."""
    counted = []

    class Counting(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is ADD and _by_autograd(sys._getframe(1)):
                first, _ = args
                counted.append(_references(first))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Counting():
        x = torch.ones(2, requires_grad=True)
        torch.stack((x.sin(), x.cos())).sum().backward()
    return counted[0]
