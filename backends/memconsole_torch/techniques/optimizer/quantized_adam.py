"""AdamW whose moments are stored in 8 bits, as `memconsole_trainer.techniques.blockwise` specifies.

A step processes slices of a weight. A slice's moments are widened to fp32 in buffers that all
slices share, updated, used, and narrowed again, so no fp32 copy of a whole moment ever exists. The
update uses the moments before they are narrowed. On a GPU one kernel does this (`kernels.adamw`).

No library is used, so that both backends follow one specification, are tested against the same
vectors, and store the same codes. bitsandbytes also saves less on a CPU, where it makes fp32 copies
of a whole weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memconsole_torch.kernels import adamw, launch
from memconsole_torch.kernels.adamw import TINY, Factors
from memconsole_torch.techniques.optimizer.rule import BaseRule
from memconsole_trainer.techniques import blockwise
from memconsole_trainer.techniques.blockwise import BLOCK

CPU_SLICE = 2**17
"""Elements per slice on a CPU: 2 MiB of buffers, which stay in the processor's cache."""
THREAD_SLICE = 2**16
"""Elements per slice on a CPU if several threads update slices."""
MOST_THREADS = 4
"""Threads that update slices; more would wait for the interpreter."""
DEVICE_SLICE = 2**22
"""Elements per slice on other devices without Triton: 64 MiB of buffers. A slice takes some 34 kernel launches there, which
cost more time than smaller kernels do."""
Slice: TypeAlias = tuple[Tensor, Tensor, dict[str, Tensor], int, Factors]
"""A slice of a weight, the same slice of its gradient, the weight's state, the index of the slice's first element, and
the factors of the update."""


class QuantizedAdamW(BaseRule):
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
            (p, p.grad.reshape(-1), factors)
            for group in self.param_groups
            for factors in (factors_of(group),)
            for p in group["params"]
            if p.grad is not None
        ]
        if not trained:
            return
        device = trained[0][0].device
        if launch.runs_on(device):
            tables = _tables(device)
            for p, gradient, factors in trained:
                adamw.update(p.view(-1), gradient, self.state[p], tables, factors)
            return
        threads = min(torch.get_num_threads(), MOST_THREADS)
        alone = device.type != "cpu" or threads == 1 or self.buffers is not None
        if alone or _get_current_dispatch_mode() is not None:
            buffers = self.buffers or Buffers(device)
            for cut in self._slices(trained, buffers.size):
                buffers.update(*cut)
        else:
            _in_threads(list(self._slices(trained, THREAD_SLICE)), threads, device)

    def _slices(
        self, trained: Iterable[tuple[Tensor, Tensor, Factors]], size: int
    ) -> Iterator[Slice]:
        """The slices of all weights, which can be updated independently."""
        for p, gradient, factors in trained:
            weight = p.view(-1)
            for start in range(0, p.numel(), size):
                part = slice(start, start + size)
                yield weight[part], gradient[part], self.state[p], start, factors


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


class Cut(NamedTuple):
    """Views of the buffers for slices of one length. They are cached, because making a view costs as much
    as a small operation and most slices have the same length."""

    moments: tuple[Tensor, Tensor]
    """(n,) each: of the second moment, which has no sign, and of the first one."""
    blocks: tuple[Tensor, Tensor]
    """(blocks, 256) each: the same, to the end of the last block."""
    padding: tuple[Tensor, Tensor] | None
    """The rest of each buffer after the slice, up to the end of the last block; None if there is none."""
    rows: Tensor
    """(n,) int32"""
    work: Tensor
    """(n,)"""
    work_blocks: Tensor
    """(blocks, 256)"""
    bits: Tensor
    """(n,) int32: those of `work`."""


class Buffers:
    """The buffers of an optimizer step, and the update of a slice in them."""

    def __init__(self, device: torch.device, size: int | None = None) -> None:
        self.size = size or (CPU_SLICE if device.type == "cpu" else DEVICE_SLICE)
        self._second, self._first, self._work = torch.empty(3, self.size, device=device)
        self._rows = torch.empty(self.size, dtype=torch.int32, device=device)
        self._values, self._lookup = _tables(device)
        self._cuts: dict[int, Cut] = {}

    def cut(self, n: int) -> Cut:
        """Views of the buffers for a slice of `n` elements."""
        found = self._cuts.get(n)
        if found is None:
            whole = blockwise.scales_of(n) * BLOCK
            pair, work = (self._second, self._first), self._work
            blocks = [moment[:whole].view(-1, BLOCK) for moment in pair]
            found = self._cuts[n] = Cut(
                (pair[0][:n], pair[1][:n]),
                (blocks[0], blocks[1]),
                (pair[0][n:whole], pair[1][n:whole]) if n < whole else None,
                self._rows[:n],
                work[:n],
                work[:whole].view(-1, BLOCK),
                work[:n].view(torch.int32),
            )
        return found

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        start: int,
        factors: Factors,
    ) -> None:
        """Update the slice `weight` (n,), which starts at element `start` of its tensor."""
        n = weight.numel()
        part = slice(start, start + n)
        if "first" in state:
            first, second = state["first"].view(-1)[part], state["second"].view(-1)[part]
            self._adamw(weight, gradient, first, second, factors)
            return
        blocks = slice(start // BLOCK, blockwise.scales_of(start + n))
        first_codes, first_scales = state["first_codes"][part], state["first_scales"][blocks]
        second_codes, second_scales = state["second_codes"][part], state["second_scales"][blocks]
        first = self.widen(first_codes, first_scales, signed=True)
        second = self.widen(second_codes, second_scales, signed=False)
        self._adamw(weight, gradient, first, second, factors)
        self.narrow(first_codes, first_scales, signed=True)
        self.narrow(second_codes, second_scales, signed=False)

    def _adamw(
        self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, factors: Factors
    ) -> None:
        work = self.cut(weight.numel()).work
        first.lerp_(gradient, factors.first_share)
        second.lerp_(torch.mul(gradient, gradient, out=work), factors.second_share)
        torch.sqrt(second, out=work)
        if not isinstance(factors.kept, float) or factors.kept != 1.0:
            weight.mul_(factors.kept)
        work.add_(factors.epsilon)
        size = factors.step_size
        if isinstance(size, Tensor):
            weight.sub_(torch.div(first, work, out=work).mul_(size))
        else:
            weight.addcdiv_(first, work, value=-size)

    def widen(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        """Decode `codes` (n,) to fp32 in the buffer of the first moment, if `signed`, or of the second
        one. It is padded with zeros to the end of the last block."""
        cut = self.cut(codes.numel())
        found = cut.moments[signed]
        torch.index_select(self._values[signed], 0, cut.rows.copy_(codes), out=found)
        if cut.padding is not None:
            cut.padding[signed].zero_()
        cut.blocks[signed].mul_(scales[:, None])
        return found

    def narrow(self, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        """Encode the buffer of a moment, whole blocks of it, into `codes` (n,) and `scales`."""
        cut = self.cut(codes.numel())
        blocks, work = cut.blocks[signed], cut.work_blocks
        torch.amax(torch.abs(blocks, out=work) if signed else blocks, dim=1, out=scales)
        reciprocal = torch.where(scales < TINY, 0.0, scales.reciprocal())
        torch.mul(blocks, reciprocal[:, None], out=work)
        rows = cut.bits.add_(blockwise.HALF).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        torch.index_select(self._lookup[signed], 0, rows, out=codes)


def factors_of(group: dict[str, Any]) -> Factors:
    """The factors of this step's update. m / c1 / (sqrt(v) / c2 + eps) is computed with one division."""
    beta1, beta2 = group["betas"]
    count, live = group["count"], group["live"]
    if isinstance(count, Tensor):
        count = count.clamp(min=1.0)  # it is 0 if every step so far was skipped
    rate = group["lr"] * live
    scale = (1 - beta2**count) ** 0.5
    decay = group["weight_decay"]
    return Factors(
        (1 - beta1) * live,
        (1 - beta2) * live,
        scale * group["eps"],
        1 - rate * decay if decay else 1.0,
        rate * scale / (1 - beta1**count),
    )


@cache
def _tables(device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The maps of codes to numbers, without and with sign, and those of a number's upper 16 bits, unsigned, to
    codes. A device gets them once, because it waits for such copies."""
    values = (blockwise.values(signed=s) for s in (False, True))
    lookup = (np.roll(blockwise.lookup(signed=s), -blockwise.OFFSET) for s in (False, True))
    first, second, *codes = (_table(table, device) for table in (*values, *lookup))
    return (first, second), (codes[0], codes[1])


def _table(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
