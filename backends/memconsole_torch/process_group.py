"""The process group of a torch run, whose processes torchrun starts."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from memconsole.plan.plan import PlanError
from memconsole_torch.exchanges import Exchanges
from memconsole_trainer.backends import MEMBER
from memconsole_trainer.process_group import SingleProcess

TIMEOUT = timedelta(days=30)
"""How long a process waits for the others: a run may be paused. A process that died is noticed at once."""


class TorchProcessGroup:
    """Implements `ProcessGroup` with torch.distributed. Small messages pass between the hosts, so that none
    waits for a device."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = DeviceMesh(device.type, list(range(self.size)))
        self.exchanges = Exchanges(device)
        self._on_cpu = device.type == "cpu"
        self._hosts = (
            dist.group.WORLD if self._on_cpu else dist.new_group(backend="gloo", timeout=TIMEOUT)
        )

    @property
    def exchange_seconds(self) -> float:
        return self.exchanges.seconds

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        largest = torch.tensor(numbers)
        began = self.exchanges.mark() if self._on_cpu else None
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._hosts)
        if began is not None:  # a GPU computes meanwhile, so the wait costs nothing
            self.exchanges.count(began)
        return tuple(largest.tolist())

    def broadcast(self, text: str = "") -> str:
        data = bytearray(text.encode()) if self.rank == 0 else bytearray()
        (size,) = self.all_reduce_max(len(data))
        data.extend(bytes(size - len(data)))
        if size:
            message = torch.frombuffer(data, dtype=torch.uint8)
            dist.broadcast(message, 0, self._hosts)
        return data.decode()

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Sum a tensor of the device over all processes, in place."""
        began = self.exchanges.mark()
        dist.all_reduce(value)
        self.exchanges.count(began)
        return value

    def all_gather_rows(self, local: Tensor) -> Tensor:
        """The rows of all processes in the order of their ranks. `local` are this process's rows, on the device; every
        process has as many."""
        whole = local.new_zeros((self.size * len(local), *local.shape[1:]))
        whole[self.rank * len(local) : (self.rank + 1) * len(local)] = local
        return self.all_reduce_sum(whole)  # the other processes have zeros in these rows


def local_rank() -> int:
    """This process's number on its machine; 0 if it trains alone."""
    return int(os.environ["LOCAL_RANK"]) if os.environ.get(MEMBER) else 0


def join(count: int, device: torch.device) -> TorchProcessGroup | SingleProcess:
    """Join the other processes of a run on `count` devices. Returns at once if `count` is 1.

    Raises `PlanError` if this process was not started with the others, or if there can be only one such device.
    """
    if count == 1:
        return SingleProcess()
    if not os.environ.get(MEMBER):
        raise PlanError(f"device.count = {count}: this process trains alone", "device.count")
    if device.type == "mps":
        raise PlanError(f"device.count = {count}: there is one Apple GPU", "device.count")
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=TIMEOUT)
    return TorchProcessGroup(device)
