"""Loads weights into a module one tensor at a time, so that the model never exists twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memconsole.plan.models.model import Model, Parameter
from memconsole_torch.shards import is_shard, local_row_slice
from memconsole_trainer.engine import WeightsError, WeightSource

Array = NDArray[np.generic]
Module = TypeVar("Module", bound=nn.Module)


def _whole(parameter: Parameter, array: Array) -> Iterable[tuple[str, Array]]:
    return ((parameter.name, array),)


def load(
    model: Model,
    make: Callable[[], Module],
    weights: WeightSource,
    device: torch.device,
    change: Callable[[Module], None] | None = None,
    parts: Callable[[Parameter, Array], Iterable[tuple[str, Array]]] = _whole,
) -> Module:
    """Make a module with `make`, put it on `device` and load `weights`, in fp32 unless `change`
    changes the dtype.

    The module is allocated directly on the device; the host holds one tensor at a time. `change` is
    called before allocation, on a module of shapes only. `parts` maps a weight to the tensors it is
    stored as.
    """
    with torch.device("meta"):
        module = make()
    if change is not None:
        change(module)
    _allocate(module, device)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for parameter in model.parameters():
        for name, array in parts(parameter, weights.tensor(parameter.name)):
            copy_into(own[name], array, name)
    return module


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Give the parameters and buffers of a module of shapes memory on `device`, without values.

    `to_empty` does it for shards, too, but imports a library for symbolic shapes, which takes half a
    second.
    """
    if any(map(is_shard, module.parameters())):
        module.to_empty(device=device)
        return
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            made = torch.empty(p.shape, dtype=p.dtype, device=device)
            setattr(part, name, nn.Parameter(made, p.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def on_host(tensor: Tensor) -> Array:
    """`tensor` as an array. On a CPU they share memory. bf16 becomes NumPy's extension type."""
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # type: ignore[import-not-found,unused-ignore]

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


@torch.no_grad()
def copy_into(target: Tensor, array: NDArray[np.generic], name: str) -> None:
    """Overwrite `target` with `array`, or the rows of it that this process holds. Raises `WeightsError` if the shapes differ."""
    if tuple(array.shape) != tuple(target.shape):
        raise WeightsError(f"{name}: shape {tuple(array.shape)}, expected {tuple(target.shape)}")
    if is_shard(target):
        target, array = target.to_local(), array[local_row_slice(target)]
    if array.dtype.name == "bfloat16":  # NumPy's extension type, unknown to torch
        bits = np.require(array.view(np.int16), requirements=["C", "W"])
        target.copy_(torch.from_numpy(bits).view(torch.bfloat16))
    else:
        source = torch.from_numpy(np.require(array, requirements=["C", "W"]))
        if target.dtype == torch.float16:  # clipped as in `adapters.narrow_rounded`
            most = torch.finfo(torch.float16).max
            source = source.clamp(-most, most)
        target.copy_(source)
