"""Weights that are split by rows over the processes: which rows each holds, and how blocks get the whole weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shard(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether each process holds only some rows of `tensor`. A run on one device never imports the library
    for shards."""
    made_by = sys.modules.get("torch.distributed.tensor")
    return made_by is not None and isinstance(tensor, made_by.DTensor)


def local_row_slice(shard: DTensor) -> slice:
    """The rows of the whole weight that this process holds: an equal part, or fewer for the last processes."""
    mesh, count = shard.device_mesh, shard.shape[0]
    chunk = -(-count // mesh.size())
    first = min(count, chunk * mesh.get_local_rank())
    return slice(first, min(count, first + chunk))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """A context in which the weights of a part of a model are gathered outside a forward pass."""
    sharded: Any = module
    if not hasattr(module, "unshard"):  # as `fully_shard` gives it to the modules that it splits
        yield
        return
    sharded.unshard()
    try:
        yield
    finally:
        sharded.reshard()
