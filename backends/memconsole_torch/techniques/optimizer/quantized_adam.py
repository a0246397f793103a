"""AdamW whose moments are stored in 8 bits, as `memconsole_trainer.techniques.blockwise` specifies.

A step processes slices of a weight. A slice's moments are widened to fp32 in buffers that all
slices share, updated, used, and narrowed again, so no fp32 copy of a whole moment ever exists. The
update uses the moments before they are narrowed.

No library is used, so that both backends follow one specification, are tested against the same
vectors, and store the same codes. bitsandbytes also saves less on a CPU, where it makes fp32 copies
of a whole weight.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memconsole_torch.techniques.optimizer.rule import OwnRule
from memconsole_trainer.techniques import blockwise
from memconsole_trainer.techniques.blockwise import BLOCK

CPU_SLICE = 2**17
"""Elements per slice on a CPU: 2 MiB of buffers, which stay in the processor's cache."""
THREAD_SLICE = 2**16
"""The same in each of several threads."""
MOST_THREADS = 4
"""Threads that update slices; more would wait for the interpreter."""
DEVICE_SLICE = 2**20
"""Elements per slice on other devices, where each slice costs some 25 kernel launches."""
UPPER = 1 if sys.byteorder == "little" else 0
"""Where the upper 16 bits of a number lie in memory."""
Slice: TypeAlias = tuple[Tensor, Tensor, dict[str, Tensor], int, dict[str, Any]]
"""A slice of a weight and of its gradient, the weight's state, the slice's first element, its group."""
_TINY = torch.finfo(torch.float32).tiny


class QuantizedAdamW(OwnRule):
    """Decoupled AdamW (Loshchilov and Hutter 2019, algorithm 2) with 8-bit moments for `quantized`.

    The other weights have fp32 moments and the same update.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        betas: tuple[float, float],
        epsilon: float,
        quantized: Collection[Tensor],
    ) -> None:
        defaults = {"lr": 0.0, "betas": betas, "eps": epsilon, "weight_decay": 0.0}
        super().__init__(groups, defaults | {"count": 0, "live": 1.0})
        self.buffers: Buffers | None = None
        """Set by a caller that reuses the buffers for several calls of `step`."""
        narrow = {id(p) for p in quantized}
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = _narrow_state(p) if id(p) in narrow else _wide_state(p)

    @torch.no_grad()
    def step(self) -> None:
        """One update, slice by slice."""
        for group in self.param_groups:
            group["count"] = group["count"] + group["live"]
        trained = [
            (p, p.grad.reshape(-1), group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not trained:
            return
        device = trained[0][0].device
        threads = min(torch.get_num_threads(), MOST_THREADS)
        alone = device.type != "cpu" or threads == 1 or self.buffers is not None
        if alone or _get_current_dispatch_mode() is not None:
            buffers = self.buffers or Buffers(device)
            for cut in self._slices(trained, buffers.size):
                buffers.update(*cut)
        else:
            _in_threads(list(self._slices(trained, THREAD_SLICE)), threads, device)

    def _slices(
        self, trained: Iterable[tuple[Tensor, Tensor, dict[str, Any]]], size: int
    ) -> Iterator[Slice]:
        """The slices of all weights: they do not depend on one another."""
        for p, gradient, group in trained:
            weight = p.view(-1)
            for start in range(0, p.numel(), size):
                part = slice(start, start + size)
                yield weight[part], gradient[part], self.state[p], start, group


def _in_threads(slices: Sequence[Slice], threads: int, device: torch.device) -> None:
    """Update slices in several threads, each with buffers of its own.

    torch runs a lookup in one thread only, and waits for its threads after each operation.
    """

    @torch.no_grad()
    def run(first: int) -> None:
        torch.set_num_threads(1)
        buffers = Buffers(device, THREAD_SLICE)
        for cut in slices[first::threads]:
            buffers.update(*cut)

    whole = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, range(threads)))
    finally:
        torch.set_num_threads(whole)  # the last call also decides for threads that start later


def _narrow_state(p: Tensor) -> dict[str, Tensor]:
    blocks = blockwise.scales_of(p.numel())
    return {
        "first_codes": torch.zeros(p.numel(), dtype=torch.uint8, device=p.device),
        "first_scales": torch.zeros(blocks, device=p.device),
        "second_codes": torch.zeros(p.numel(), dtype=torch.uint8, device=p.device),
        "second_scales": torch.zeros(blocks, device=p.device),
    }


def _wide_state(p: Tensor) -> dict[str, Tensor]:
    return {slot: torch.zeros_like(p, dtype=torch.float32) for slot in ("first", "second")}


class Buffers:
    """The buffers of an optimizer step, and the update of a slice in them."""

    def __init__(self, device: torch.device, size: int | None = None) -> None:
        self.size = size or (CPU_SLICE if device.type == "cpu" else DEVICE_SLICE)
        self._first, self._second, self._work = torch.empty(3, self.size, device=device)
        self._rows = torch.empty(self.size, dtype=torch.int32, device=device)
        self._values = [_table(blockwise.values(signed=s), device) for s in (False, True)]
        # By the upper 16 bits as an unsigned number.
        rolled = [np.roll(blockwise.lookup(signed=s), -blockwise.OFFSET) for s in (False, True)]
        self._lookup = [_table(table, device) for table in rolled]

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        start: int,
        group: dict[str, Any],
    ) -> None:
        """Update the slice `weight` (n,), which starts at element `start` of its tensor."""
        n = weight.numel()
        if "first" in state:
            part = slice(start, start + n)
            first, second = state["first"].view(-1)[part], state["second"].view(-1)[part]
            self._adamw(weight, gradient, first, second, group)
            return
        part = slice(start, start + n)
        blocks = slice(start // BLOCK, blockwise.scales_of(start + n))
        codes = state["first_codes"][part], state["second_codes"][part]
        scales = state["first_scales"][blocks], state["second_scales"][blocks]
        first = self.widen(codes[0], scales[0], self._first, signed=True)
        second = self.widen(codes[1], scales[1], self._second, signed=False)
        self._adamw(weight, gradient, first, second, group)
        self.narrow(self._first, codes[0], scales[0], signed=True)
        self.narrow(self._second, codes[1], scales[1], signed=False)

    def _adamw(
        self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        work = self._work[: weight.numel()]
        count, live = group["count"], group["live"]
        if isinstance(count, Tensor):
            count = count.clamp(min=1.0)  # it is 0 if every step so far was skipped
        rate = group["lr"] * live
        first.lerp_(gradient, (1 - beta1) * live)
        second.lerp_(torch.mul(gradient, gradient, out=work), (1 - beta2) * live)
        torch.sqrt(second, out=work)
        if group["weight_decay"]:
            weight.mul_(1 - rate * group["weight_decay"])
        # m / c1 / (sqrt(v) / c2 + eps) with one division
        scale = (1 - beta2**count) ** 0.5
        work.add_(scale * group["eps"])
        size = rate * scale / (1 - beta1**count)
        if isinstance(size, Tensor):
            weight.sub_(torch.div(first, work, out=work).mul_(size))
        else:
            weight.addcdiv_(first, work, value=-size)

    def widen(self, codes: Tensor, scales: Tensor, out: Tensor, *, signed: bool) -> Tensor:
        """Decode `codes` (n,) to fp32 at the start of `out`, padded with zeros to the end of the
        last block."""
        n = codes.numel()
        rows = self._rows[:n].copy_(codes)
        torch.index_select(self._values[signed], 0, rows, out=out[:n])
        whole = out[: scales.numel() * BLOCK]
        whole[n:].zero_()
        whole.view(-1, BLOCK).mul_(scales[:, None])
        return out[:n]

    def narrow(self, moment: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        """Encode the start of `moment`, whole blocks of it, into `codes` (n,) and `scales`."""
        blocks = moment[: scales.numel() * BLOCK].view(-1, BLOCK)
        work = self._work[: blocks.numel()].view(-1, BLOCK)
        magnitudes = torch.abs(blocks, out=work) if signed else blocks
        torch.amax(magnitudes, dim=1, out=scales)
        reciprocal = torch.where(scales < _TINY, 0.0, scales.reciprocal())
        torch.mul(blocks, reciprocal[:, None], out=work)
        n = codes.numel()
        bits = work.view(-1)[:n].view(torch.int32).add_(blockwise.HALF)
        rows = self._rows[:n].copy_(bits.view(torch.uint16)[UPPER::2])
        torch.index_select(self._lookup[signed], 0, rows, out=codes)


def _table(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
