"""Caches the results of operators on fake tensors, once for each combination of shapes.

The layers of a decoder are identical, so a trace repeats a few hundred operator calls tens of thousands of times.
`FakeTensorMode` has a cache too, but computing its keys takes most of a trace's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Recipe = tuple[Any, ...]
"""How to make one result: ("value", value), ("argument", index), ("new", shape, strides, type) or
("view", index, shape, strides, offset, type)."""
_CPU = torch.device("cpu")
_DEVICE = torch.ops.prim.device.default
_KEY_TYPES: tuple[Any, ...] = (
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(bool, int, float, str, type(None)),
)


class OperatorCache:
    """Runs operators for a dispatch mode that is active within `mode`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._cached: dict[Any, tuple[Any, tuple[Recipe, ...]] | None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        key = self._key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        cached = self._cached.get(key)
        if cached is not None:
            container, recipes = cached
            given = (*args, *kwargs.values())
            made = [self._make(recipe, given) for recipe in recipes]
            return made[0] if container is None else container(made)
        result = func(*args, **kwargs)
        if key not in self._cached:
            self._cached[key] = _recipes((*args, *kwargs.values()), result)
        return result

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The cache key: everything the result depends on. None if that is not known."""
        parts: list[Any] = [func]
        try:
            for value in args:
                parts.append(_key_of(value))
            for name, value in kwargs.items():
                parts += (name, _key_of(value))
        except _NoKeyError:
            return None
        return tuple(parts)

    def _make(self, recipe: Recipe, args: tuple[Any, ...]) -> Any:
        """The result that a recipe makes of these arguments."""
        kind = recipe[0]
        if kind == "value":
            return recipe[1]
        if kind == "argument":
            return args[recipe[1]]
        with torch._C._DisableTorchDispatch():
            if kind == "new":
                _, shape, strides, dtype = recipe
                tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            else:
                _, index, shape, strides, offset, dtype = recipe
                tensor = torch.empty(0, dtype=dtype, device="meta")
                tensor.set_(args[index].untyped_storage(), offset, shape, strides)
        return FakeTensor(self._mode, tensor, _CPU)


class _NoKeyError(TypeError):
    """An argument of a type that cannot be part of a cache key."""


def _key_of(value: Any) -> Any:
    """The part of a cache key for one argument. Raises `_NoKeyError`."""
    if isinstance(value, Tensor):
        if type(value) is not FakeTensor and not isinstance(value, torch.nn.Parameter):
            raise _NoKeyError
        if (value.fake_device if type(value) is FakeTensor else value.device) != _CPU:
            raise _NoKeyError  # weights that have shapes only, before they are allocated
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_key_of(inner) for inner in value])
    if isinstance(value, _KEY_TYPES):
        return type(value), value
    raise _NoKeyError


def _recipes(args: tuple[Any, ...], result: Any) -> tuple[Any, tuple[Recipe, ...]] | None:
    """How to rebuild the result from `args`; None if that is impossible."""
    if isinstance(result, list | tuple):
        made = [_recipe(args, value) for value in result]
        container = type(result)
        if container not in (list, tuple):
            return None
    else:
        made, container = [_recipe(args, result)], None
    if any(recipe is None for recipe in made):
        return None
    return container, tuple(recipe for recipe in made if recipe is not None)


def _recipe(args: tuple[Any, ...], value: Any) -> Recipe | None:
    """How to rebuild one result from `args`; None if that is impossible."""
    if not isinstance(value, Tensor):
        return ("value", value) if isinstance(value, _KEY_TYPES) else None
    for index, argument in enumerate(args):
        if argument is value:
            return ("argument", index)
    if type(value) is not FakeTensor or value.fake_device != _CPU:
        return None
    dtype = value.dtype
    storage = value.untyped_storage()
    for index, argument in enumerate(args):
        if isinstance(argument, Tensor) and argument.untyped_storage()._cdata == storage._cdata:
            offset = value.storage_offset()
            return ("view", index, value.shape, value.stride(), offset, dtype)
    if value.storage_offset():
        return None
    shape, strides = value.shape, value.stride()
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        same = made.untyped_storage().nbytes() == storage.nbytes()
    return ("new", shape, strides, dtype) if same else None
