"""Snapshots of the trained weights and jumps between them, in torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memconsole.plan.sections.optimize import Precision
from memconsole_torch.models.pretrained import copy_into, on_host
from memconsole_torch.releasing import Releaser
from memconsole_torch.tasks.task import MicroBatch, Task
from memconsole_torch.techniques import compilation
from memconsole_torch.techniques.weights import precision
from memconsole_trainer.control.confirm import rows_of_group
from memconsole_trainer.engine import Array, Batch, StateSource
from memconsole_trainer.jumps import PREFIX, SHRINKAGE, TINY, Pairs, Path, saved_snapshots

CPU_SLICE = 2**17
"""Elements of a weight whose snapshots are converted to fp32 at a time, on a CPU."""
DEVICE_SLICE = 2**22
_BF16 = torch.bfloat16


class TorchJumps:
    """Implements `memconsole_trainer.jumps.Jumps`.

    The first snapshot's bf16 rounding is the anchor. Each snapshot is stored as its difference from
    the anchor in bf16, which is more precise than the bf16 of a weight as long as weights stay near
    the anchor.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Mapping[str, str],
        task: Task,
        place: Callable[[Array], Tensor],
        compute: Precision,
        *,
        moves: bool,
    ) -> None:
        """`groups`: the group of each trained weight by name. `place` copies an array to the
        device. `moves`: the device has memory of its own."""
        own = dict(module.named_parameters())
        self._weights = {name: own[name] for name in groups}
        self._groups, self._module, self._task, self._place = groups, module, task, place
        self._compute: Precision = compute
        self._device = next(iter(self._weights.values())).device
        self._slice = CPU_SLICE if self._device.type == "cpu" else DEVICE_SLICE
        self._anchor: dict[str, Tensor] = {}
        self._snapshots: list[dict[str, Tensor]] = []
        self._path: dict[str, Tensor] = {}
        self._base: dict[str, Tensor] = {}
        """The unmoved weights that a jump tries, some as bf16 copies."""
        self._tried: dict[str, Tensor] = {}
        """Memory for the weights that a jump tries; all its forward passes use the same."""
        self._before: dict[str, Tensor] = {}
        """The weights before the first move since `settle`, on the host."""
        self._releaser = Releaser(
            self._device, lambda part: self._bf16_weights().values(), moves=moves
        )

    @torch.no_grad()
    def snapshot(self) -> None:
        """Add a snapshot of the weights."""
        if not self._snapshots:
            self._anchor = {n: w.to(_BF16).cpu() for n, w in self._weights.items()}
        # First the arrays that last: those of a snapshot that was dropped leave gaps of their sizes.
        taken = {n: torch.empty(w.shape, dtype=_BF16) for n, w in self._weights.items()}
        for name, w in self._weights.items():
            taken[name].copy_((w - self._anchor[name].to(self._device)).to(_BF16))
        self._snapshots.append(taken)

    def forget(self, count: int) -> None:
        """Drop the `count` oldest snapshots."""
        del self._snapshots[:count]
        if not self._snapshots:
            self._anchor = {}

    @torch.no_grad()
    def products(self, pairs: Pairs) -> dict[str, NDArray[np.float64]]:
        """The inner products of movements, (pairs, pairs), by group."""
        found: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros((len(pairs),) * 2))
        work = self._workspace(pairs)
        for name, group in self._groups.items():
            for _, moved in self._movements(name, pairs, work):
                found[group] += (moved @ moved.T).cpu().double().numpy()
        return dict(found)

    @torch.no_grad()
    def begin(self, path: Path) -> None:
        """Prepare to try moves along `path`."""
        # Matrices leave the device before anything is added to it.
        self._releaser.release("weights")
        in_bf16 = self._bf16_weights()
        work = self._workspace(path.pairs)
        self._base = {
            n: self._releaser.values(w).to(self._device).to(_BF16) if n in in_bf16 else w
            for n, w in self._weights.items()
        }
        # Arrays that last are allocated one after the other. Between temporary arrays they would leave gaps in the heap of
        # a CPU.
        self._path = {n: torch.empty_like(w, dtype=_BF16) for n, w in self._weights.items()}
        for name, group in self._groups.items():
            shares = torch.from_numpy(path.shares[group]).float().to(self._device)
            flat = self._path[name].view(-1)
            for part, moved in self._movements(name, path.pairs, work):
                flat[part] = _shrunk_sum(moved, shares).to(_BF16)

    @torch.no_grad()
    def loss(self, batch: Batch, scale: float) -> float:
        """The summed loss of `batch` with the weights moved by `scale` times the path."""
        total = torch.zeros((), device=self._device)
        with self._moved(scale), compilation.paused():
            for arrays in batch.micro_batches():
                with precision.forward_context(self._device, self._compute):
                    total += self._task.sums(self._module, MicroBatch(arrays, self._place))[0]
        return float(total)

    @torch.no_grad()
    def losses(self, batch: Batch, scale: float) -> NDArray[np.float64]:
        """The summed loss of each group of rows of `batch`, computed one after another."""
        losses: list[Tensor] = []
        count, rows = next(iter(batch.arrays.values())).shape[:2]
        size = rows_of_group(rows, count)
        with self._moved(scale), compilation.paused():
            for arrays in batch.micro_batches():
                for start in range(0, rows, size):
                    part = {name: array[start : start + size] for name, array in arrays.items()}
                    with precision.forward_context(self._device, self._compute):
                        losses.append(
                            self._task.sums(self._module, MicroBatch(part, self._place))[0]
                        )
        summed: NDArray[np.float64] = torch.stack(losses).cpu().double().numpy()
        return summed

    @torch.no_grad()
    def end(self, scale: float) -> None:
        """Move the weights by `scale` times the path. With 0 they are as before, bit for bit."""
        self._base, self._tried = {}, {}
        self._releaser.restore("weights")
        if scale and not self._before:
            self._before = {n: w.detach().cpu().clone() for n, w in self._weights.items()}
        for name, weight in self._weights.items() if scale else ():
            weight.add_(self._path[name], alpha=scale)
        self._path = {}

    @torch.no_grad()
    def undo(self) -> None:
        """Set the weights back to before the first move since `settle`, bit for bit."""
        for name, before in self._before.items():
            self._weights[name].copy_(before)
        self._before = {}

    def settle(self) -> None:
        """Forget the weights to which `undo` would set back."""
        self._before = {}

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """The snapshots as the tensors of a checkpoint."""
        for name, tensor in self._before.items():
            yield f"{PREFIX}before.{name}", on_host(tensor)
        for name, tensor in self._anchor.items():
            yield f"{PREFIX}anchor.{name}", on_host(tensor)
        for number, snapshot in enumerate(self._snapshots):
            for name, tensor in snapshot.items():
                yield f"{PREFIX}{number}.{name}", on_host(tensor)

    def load(self, source: StateSource) -> None:
        """Take over the snapshots of a checkpoint."""

        def taken(which: str, dtype: torch.dtype = _BF16) -> dict[str, Tensor]:
            found = {n: torch.empty(w.shape, dtype=dtype) for n, w in self._weights.items()}
            for name, tensor in found.items():
                copy_into(tensor, source.tensor(f"{PREFIX}{which}.{name}"), name)
            return found

        kept = saved_snapshots(source)
        self._before = taken("before", torch.float32) if kept.before else {}
        self._anchor = taken("anchor") if kept.snapshots else {}
        self._snapshots = [taken(str(number)) for number in range(kept.snapshots)]

    def _workspace(self, pairs: Pairs) -> Tensor:
        """Memory for the movements of a slice. All slices use the same: arrays of many sizes would leave gaps in the heap
        of a CPU."""
        largest = max(weight.numel() for weight in self._weights.values())
        return torch.empty(len(pairs) * min(largest, self._slice), device=self._device)

    def _movements(self, name: str, pairs: Pairs, work: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The movements of a weight on the device, (pairs, elements) in fp32, slice by slice in `work`."""
        flat = [snapshot[name].view(-1) for snapshot in self._snapshots]
        for start in range(0, flat[0].numel(), self._slice):
            part = slice(start, start + self._slice)
            rows = [f[part].to(self._device) for f in flat]
            moved = work[: len(pairs) * len(rows[0])].view(len(pairs), -1)
            for movement, (before, after) in zip(moved, pairs, strict=True):
                movement.copy_(rows[after]).sub_(rows[before])
            yield part, moved

    def _bf16_weights(self) -> dict[str, Tensor]:
        """The weights that predict phases use as bf16 copies: matrices, if these phases compute in bf16."""
        if self._compute != "bf16":
            return {}
        return {name: weight for name, weight in self._weights.items() if weight.dim() > 1}

    @contextmanager
    def _moved(self, scale: float) -> Iterator[None]:
        """A context in which the module's weights are moved by `scale` times the path."""
        values = self._base
        if scale:
            self._tried = self._tried or {n: torch.empty_like(x) for n, x in self._base.items()}
            values = self._tried
            for name, base in self._base.items():
                torch.add(base, self._path[name], alpha=scale, out=values[name])
        tried = {
            id(weight): nn.Parameter(values[n].detach(), requires_grad=False)
            for n, weight in self._weights.items()
        }
        places = [
            (module._parameters, key, parameter)
            for module in self._module.modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in tried
        ]
        try:
            for parameters, key, parameter in places:
                parameters[key] = tried[id(parameter)]
            yield
        finally:
            for parameters, key, parameter in places:
                parameters[key] = parameter


def _shrunk_sum(movements: Tensor, shares: Tensor) -> Tensor:
    """See `memconsole_trainer.jumps.shrunk_sum`."""
    variance, mean = torch.var_mean(movements, dim=0)
    # in place, so that few arrays of this size are allocated
    squared_error = variance.div_(len(movements))
    noise = squared_error.mul_(SHRINKAGE).div_(mean.square_().add_(TINY))
    factor = noise.neg_().add_(1).clamp_(min=0)
    return (shares @ movements).mul_(factor)
