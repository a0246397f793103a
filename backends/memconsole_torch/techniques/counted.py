"""The exchanges of `fully_shard`, counted: gathering a block's weights, and adding up its gradients."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from memconsole_torch.exchanges import Exchanges


class _Counted:
    """Put before a collective's class: counts the time of each call."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        began = self._exchanges.mark()
        work = super().__call__(*arguments, **options)  # type: ignore[misc]  # the collective's
        self._exchanges.count(began)
        return work


class Gather(_Counted, DefaultAllGather):
    """All-gather."""


class Reduce(_Counted, DefaultReduceScatter):
    """Reduce-scatter."""
