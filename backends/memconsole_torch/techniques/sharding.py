"""Training on several devices: each process computes some rows of a batch and adds its gradients to
those of the others.

`ddp`: every process holds all weights (`DistributedDataParallel`). `fsdp`: every process holds some
rows of each weight (`fully_shard`). A block's weights are gathered before its forward pass and again
before its backward pass, in 16 bits if the plan computes in 16 bits; weights outside the blocks are
gathered once for a whole micro-batch. The optimizer updates the rows that a process holds, as
ordinary tensors.

Each process's loss is a share of the whole batch's, so gradients are added up, not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from memconsole.plan.plan import Plan
from memconsole_torch.exchanges import Exchanges, Mark
from memconsole_torch.shards import is_shard, local_row_slice
from memconsole_torch.techniques.weights.precision import COMPUTE
from memconsole_torch.techniques.weights.rounding import widen_lookups
from memconsole_trainer.engine import Array

if TYPE_CHECKING:  # importing it takes a second, and a run on one device does not need it
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class Replicated(DistributedDataParallel):
    """A module whose gradients are added up over all processes at the end of a backward pass."""

    def __init__(self, module: nn.Module, exchanges: Exchanges) -> None:
        super().__init__(
            module, forward_sync_buffers=False, gradient_as_bucket_view=True, init_sync=False
        )
        self._exchanges = exchanges
        self._ready: Mark | None = None
        for weight in module.parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def _gradient_is_ready(self, _: Tensor) -> None:
        """Record the time at which a gradient of this process is complete."""
        self._ready = self._exchanges.mark()

    def count_exchange(self) -> None:
        """Count the time since this process's last gradient as spent on the exchange. Call it after a backward pass."""
        if self._ready is not None:
            self._exchanges.count(self._ready)
            self._ready = None


def backward(loss: Tensor, replicated: Replicated | None) -> None:
    """Compute gradients whose sum over the processes is that of the summed loss."""
    if replicated is None:
        loss.backward()
    else:  # DistributedDataParallel averages
        loss.backward(torch.full_like(loss, replicated.process_group.size()))
        replicated.count_exchange()


def split(plan: Plan, mesh: DeviceMesh, module: nn.Module, exchanges: Exchanges) -> None:
    """Split the weights of `module`, which has shapes only, over the devices of `mesh`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from memconsole_torch.techniques.counted import Gather, Reduce

    wanted = COMPUTE.get(plan.optimize.precision)
    if wanted is not None:  # tables are gathered in 16 bits
        widen_lookups(module)
    policy = MixedPrecisionPolicy(wanted, torch.float32, cast_forward_inputs=False)
    for block in module.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The head is read after the module's forward pass, by the loss.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for part in _parts(module):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
        part.set_custom_all_gather(Gather(exchanges))
        part.set_custom_reduce_scatter(Reduce(exchanges))


class LocalRows:
    """The rows of each weight that this process holds, as ordinary parameters.

    They share memory with the shards of `module`. An optimizer gets this object in place of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.model = module.model
        self._module = module
        self._shards: dict[str, DTensor] = {}
        self._local: dict[str, nn.Parameter] = {}
        for name, shard in module.named_parameters():
            assert is_shard(shard)
            self._shards[name] = shard
            self._local[name] = nn.Parameter(shard.to_local().detach(), shard.requires_grad)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._local.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self._local.values())

    def take_gradients(self) -> None:
        """Move the gradients of the shards to the rows, after a backward pass."""
        for name, shard in self._shards.items():
            local, gradient = self._local[name], shard.grad
            if shard.to_local().untyped_storage()._cdata != local.untyped_storage()._cdata:
                raise RuntimeError(f"the rows of {name} have moved")
            local.grad = None if gradient is None else gradient.to_local()
            shard.grad = None

    def drop_gradients(self) -> None:
        """Free the gradients of an unfinished step."""
        for shard in self._shards.values():
            shard.grad = None

    def weight_of(self, name: str) -> str | None:
        """The weight whose rows a tensor of the state has: `model.W`, `ema.W`, `optimizer.W.SLOT`;
        None if it has none."""
        inner = name.partition(".")[2]
        for weight in (inner, inner.rpartition(".")[0]):
            if weight in self._local:
                return weight
        return None

    def local_part(self, name: str, whole: Array) -> Array:
        """This process's rows of `whole`, a tensor with the rows of the weight `name`."""
        return whole[local_row_slice(self._shards[name])]

    def whole(self, name: str, rows: Tensor) -> Tensor:
        """Gather a tensor from all processes. It is split over them by rows as the weight `name` is."""
        from torch.distributed.tensor import DTensor

        shard = self._shards[name]
        size = torch.Size((shard.shape[0], *rows.shape[1:]))
        spread = DTensor.from_local(
            rows, shard.device_mesh, shard.placements, run_check=False, shape=size,
            stride=torch.empty(size, device="meta").stride(),
        )  # fmt: skip
        return spread.full_tensor()

    def reshard(self) -> None:
        """Free gathered weights after a forward pass without a backward pass."""
        for part in _parts(self._module):
            part.reshard()


def _parts(module: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]
