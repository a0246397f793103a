"""The first of several processes, for a trace: the others are simulated, and no data from them is awaited.

torch's `fake` backend accepts every collective and does nothing, so one process runs the step of one rank: its shards,
the blocks that it gathers, and the buffers in which gradients are added up are those of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from memconsole.plan.plan import Plan
from memconsole_torch.exchanges import Exchanges
from memconsole_torch.process_group import TorchProcessGroup
from memconsole_torch.techniques import sharding
from memconsole_torch.tracing.trace_liveness import Liveness, Workspace
from memconsole_trainer.process_group import SingleProcess
from memconsole_trainer.weights import checkpoint

c10d, _functional = torch.ops.c10d, torch.ops._c10d_functional
OVERRIDES = {_functional.wait_tensor.default: lambda gathered: gathered}
"""On fake tensors torch would make a new tensor here, instead of waiting for the gathered one."""


@contextmanager
def simulated(plan: Plan) -> Iterator[TorchProcessGroup | SingleProcess]:
    """A context with the process group of the plan, in which this process has rank 0."""
    if plan.device.count == 1:
        yield SingleProcess()
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.device.count)
    try:
        with patch.object(sharding, "Replicated", Replicated):
            yield TorchProcessGroup(torch.device("cpu"))
    finally:
        dist.destroy_process_group()


class Replicated(sharding.Replicated):
    """A module whose gradients are ready at once, because a simulated collective has no result to wait for."""

    def __init__(self, module: torch.nn.Module, exchanges: Exchanges) -> None:
        super().__init__(module, exchanges)
        self.register_comm_hook(None, lambda _, bucket: _completed(bucket.buffer()))


def _completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def workspaces(kind: str) -> dict[Any, Workspace]:
    """The bytes that collectives allocate internally on a `kind` of device. NCCL's buffers are not counted, because they
    are outside PyTorch's allocator. Gloo copies the tensors that it gathers and scatters (ProcessGroupGloo.cpp:
    newLikeFlat in AsyncAllgatherWork, the clone in reduce_scatter_tensor_coalesced)."""
    if kind != "cpu":
        return {}
    return {
        c10d._allgather_base_.default: lambda output, *rest: [output.nbytes],
        c10d._reduce_scatter_base_.default: lambda output, whole, *rest: [whole.nbytes],
        _functional.all_gather_into_tensor.default: lambda own, count, *rest: [count * own.nbytes],
    }


@contextmanager
def declared(live: Liveness) -> Iterator[None]:
    """A context in which gathered weights are counted as weights, and the buffers that add up gradients as gradients."""
    gather, take = (
        _fsdp_param_group.foreach_all_gather,
        _fsdp_param_group.foreach_all_gather_copy_out,
    )
    reduce = _fsdp_param_group.foreach_reduce

    def within(component: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            before, live.within = live.within, component
            try:
                return function(*arguments, **options)
            finally:
                live.within = before

        return run

    def reduced(parameters: Any, gradients: list[torch.Tensor], *rest: Any) -> Any:
        for gradient in gradients:
            live.declare(gradient, "gradients")
        return reduce(parameters, gradients, *rest)

    with ExitStack() as stack:
        change = stack.enter_context
        for name, function in (
            ("foreach_all_gather", within("weights", gather)),
            ("foreach_all_gather_copy_out", within("weights", take)),
            ("foreach_reduce", within("gradients", reduced)),
        ):
            change(patch.object(_fsdp_param_group, name, function))
        change(
            patch.object(
                _fsdp_param, "alloc_storage", live.tracking_resize(_fsdp_param.alloc_storage)
            )
        )
        change(
            patch.object(
                _fsdp_param, "free_storage", live.tracking_resize(_fsdp_param.free_storage)
            )
        )
        yield


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An uninitialized tensor on `device`, shaped and sharded as `tensor`, which is on the meta device."""
    own = local_part(tensor)
    empty = torch.empty(own.shape, dtype=own.dtype, device=device)
    return (
        DTensor(empty, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else empty
    )


def save(engine: Any, kind: str) -> None:
    """Gather the state for a checkpoint. Unless the device is a CPU, each tensor is copied to the host at once."""
    state = engine.saved.named()
    if kind != "cpu" or engine.process_group.size == 1:
        for name, tensor in state:
            engine.saved.whole(name, tensor)
        return
    named = ((name, engine.saved.whole(name, tensor)) for name, tensor in state)
    with patch.object(checkpoint, "_check_finite", lambda *_: None):
        for _ in checkpoint._shards(named):
            pass
