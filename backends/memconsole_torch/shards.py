"""Weights of which each process holds some rows: which rows, and how blocks have them whole for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def rows_held(shard: DTensor) -> slice:
    """The rows of the whole weight that this process holds: an equal part, less at the end."""
    mesh, count = shard.device_mesh, shard.shape[0]
    chunk = -(-count // mesh.size())
    first = min(count, chunk * mesh.get_local_rank())
    return slice(first, min(count, first + chunk))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """A context in which a part of a model has its own weights whole without a forward pass."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
