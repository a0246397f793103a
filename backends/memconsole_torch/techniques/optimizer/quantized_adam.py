"""AdamW whose moments are stored in 8 bits, as `memconsole_trainer.techniques.blockwise` specifies.

A step handles one slice of a weight after another. It dequantizes the slice's moments to fp32 in buffers that all
slices share, updates moments and weight, and quantizes the moments again. So no fp32 copy of a whole moment ever
exists. The weight is updated with the moments before they are quantized. On a GPU one kernel does this (`kernels.adamw`).

This does not use bitsandbytes, so that both backends follow one specification, are tested against the same vectors, and
store the same codes. On a CPU bitsandbytes also saves less memory: it makes fp32 copies of a whole weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

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


class WeightSlice(NamedTuple):
    """A slice of n elements of a weight, and what its update needs."""

    weight: Tensor
    """(n,)"""
    gradient: Tensor
    """(n,)"""
    state: dict[str, Tensor]
    """The state of the whole weight."""
    start: int
    """The index of the slice's first element in the weight."""
    factors: Factors


class QuantizedAdamW(BaseRule):
    """Decoupled AdamW (Loshchilov and Hutter 2019, algorithm 2) with 8-bit moments for the weights `quantized` and fp32
    moments for the others.

    The state of a quantized weight is `first_codes` and `second_codes`, uint8 (elements,), and `first_scales` and
    `second_scales`, fp32 (blocks,); that of another weight is `first` and `second`, fp32 in its shape.
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
        quantized_ids = {id(p) for p in quantized}
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = _state_8_bit(p) if id(p) in quantized_ids else _state_fp32(p)

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
        one_thread = device.type != "cpu" or threads == 1 or self.buffers is not None
        # Other threads do not see a dispatch mode, such as that of a trace.
        if one_thread or _get_current_dispatch_mode() is not None:
            buffers = self.buffers or Buffers(device)
            for part in self._slices(trained, buffers.size):
                buffers.update(*part)
        else:
            _in_threads(list(self._slices(trained, THREAD_SLICE)), threads, device)

    def _slices(
        self, trained: Iterable[tuple[Tensor, Tensor, Factors]], size: int
    ) -> Iterator[WeightSlice]:
        """The slices of all weights, which can be updated independently."""
        for p, gradient, factors in trained:
            weight = p.view(-1)
            for start in range(0, p.numel(), size):
                part = slice(start, start + size)
                yield WeightSlice(weight[part], gradient[part], self.state[p], start, factors)


def _in_threads(slices: Sequence[WeightSlice], threads: int, device: torch.device) -> None:
    """Update slices in several threads, each with buffers of its own.

    torch's own threads would help little: it runs a lookup in one thread only, and waits for all threads after each operation.
    """

    @torch.no_grad()
    def run(first: int) -> None:
        torch.set_num_threads(1)
        buffers = Buffers(device, THREAD_SLICE)
        for part in slices[first::threads]:
            buffers.update(*part)

    torch_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, range(threads)))
    finally:
        # Threads that start later have the number of the last call.
        torch.set_num_threads(torch_threads)


def _state_8_bit(p: Tensor) -> dict[str, Tensor]:
    blocks = blockwise.scales_of(p.numel())
    return {
        "first_codes": torch.zeros(p.numel(), dtype=torch.uint8, device=p.device),
        "first_scales": torch.zeros(blocks, device=p.device),
        "second_codes": torch.zeros(p.numel(), dtype=torch.uint8, device=p.device),
        "second_scales": torch.zeros(blocks, device=p.device),
    }


def _state_fp32(p: Tensor) -> dict[str, Tensor]:
    return {slot: torch.zeros_like(p, dtype=torch.float32) for slot in ("first", "second")}


class SliceViews(NamedTuple):
    """Views of the buffers for slices of n elements. They are cached, because making a view costs as much
    as a small operation and most slices have the same length."""

    moments: tuple[Tensor, Tensor]
    """The second moment, which has no sign, and the first one, (n,) each. So the index of a moment is whether it is
    signed."""
    blocks: tuple[Tensor, Tensor]
    """The same up to the end of the last block, (blocks, 256) each."""
    padding: tuple[Tensor, Tensor] | None
    """What follows each moment up to the end of the last block; None if the slice ends with a block."""
    rows: Tensor
    """Codes as rows of the tables, (n,) int32."""
    work: Tensor
    """A temporary, (n,)."""
    work_blocks: Tensor
    """The temporary up to the end of the last block, (blocks, 256)."""
    bits: Tensor
    """The bits of the temporary, (n,) int32."""


class Buffers:
    """The buffers of an optimizer step, and the update of a slice in them."""

    def __init__(self, device: torch.device, size: int | None = None) -> None:
        self.size = size or (CPU_SLICE if device.type == "cpu" else DEVICE_SLICE)
        self._second, self._first, self._work = torch.empty(3, self.size, device=device)
        self._rows = torch.empty(self.size, dtype=torch.int32, device=device)
        self._values, self._lookup = _tables(device)
        self._views: dict[int, SliceViews] = {}

    def views(self, n: int) -> SliceViews:
        """Views of the buffers for a slice of `n` elements."""
        views = self._views.get(n)
        if views is None:
            end = blockwise.scales_of(n) * BLOCK
            second, first, work = self._second, self._first, self._work
            views = self._views[n] = SliceViews(
                moments=(second[:n], first[:n]),
                blocks=(second[:end].view(-1, BLOCK), first[:end].view(-1, BLOCK)),
                padding=(second[n:end], first[n:end]) if n < end else None,
                rows=self._rows[:n],
                work=work[:n],
                work_blocks=work[:end].view(-1, BLOCK),
                bits=work[:n].view(torch.int32),
            )
        return views

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        start: int,
        factors: Factors,
    ) -> None:
        """Update a slice of a weight and of its state in place; see `WeightSlice`."""
        n = weight.numel()
        part = slice(start, start + n)
        if "first" in state:
            first, second = state["first"].view(-1)[part], state["second"].view(-1)[part]
            self._adamw(weight, gradient, first, second, factors)
            return
        blocks = slice(start // BLOCK, blockwise.scales_of(start + n))
        first_codes, first_scales = state["first_codes"][part], state["first_scales"][blocks]
        second_codes, second_scales = state["second_codes"][part], state["second_scales"][blocks]
        first = self.dequantize(first_codes, first_scales, signed=True)
        second = self.dequantize(second_codes, second_scales, signed=False)
        self._adamw(weight, gradient, first, second, factors)
        self.quantize(first_codes, first_scales, signed=True)
        self.quantize(second_codes, second_scales, signed=False)

    def _adamw(
        self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, factors: Factors
    ) -> None:
        """Update a slice of a weight and its fp32 moments, (n,) each, in place; see `Factors` for the formula."""
        work = self.views(weight.numel()).work
        first.lerp_(gradient, factors.first_share)
        second.lerp_(torch.mul(gradient, gradient, out=work), factors.second_share)
        torch.sqrt(second, out=work)
        if not isinstance(factors.decay, float) or factors.decay != 1.0:
            weight.mul_(factors.decay)
        work.add_(factors.epsilon)
        size = factors.step_size
        if isinstance(size, Tensor):
            weight.sub_(torch.div(first, work, out=work).mul_(size))
        else:
            weight.addcdiv_(first, work, value=-size)

    def dequantize(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        """The values of `codes` (n,), fp32 (n,), in the buffer of the first moment, if `signed`, or of the second
        one. Up to the end of the last block, zeros follow them in the buffer."""
        views = self.views(codes.numel())
        moment = views.moments[signed]
        torch.index_select(self._values[signed], 0, views.rows.copy_(codes), out=moment)
        if views.padding is not None:
            views.padding[signed].zero_()
        views.blocks[signed].mul_(scales[:, None])
        return moment

    def quantize(self, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        """Write the codes (n,) and the scales (blocks,) of the moment that `dequantize` put into its buffer."""
        views = self.views(codes.numel())
        blocks, work = views.blocks[signed], views.work_blocks
        torch.amax(torch.abs(blocks, out=work) if signed else blocks, dim=1, out=scales)
        reciprocal = torch.where(scales < TINY, 0.0, scales.reciprocal())
        torch.mul(blocks, reciprocal[:, None], out=work)
        rows = views.bits.add_(blockwise.HALF).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        torch.index_select(self._lookup[signed], 0, rows, out=codes)


def factors_of(group: dict[str, Any]) -> Factors:
    """The factors of this step's update.

    With bias corrections c1 = 1 - beta1^t and c2 = sqrt(1 - beta2^t), the update m / c1 / (sqrt(v) / c2 + eps) equals
    c2 / c1 · m / (sqrt(v) + c2 · eps), which has one division of tensors.
    """
    beta1, beta2 = group["betas"]
    count, live = group["count"], group["live"]
    if isinstance(count, Tensor):
        count = count.clamp(min=1.0)  # it is 0 if every step so far was skipped
    rate = group["lr"] * live
    second_correction = (1 - beta2**count) ** 0.5
    decay = group["weight_decay"]
    return Factors(
        first_share=(1 - beta1) * live,
        second_share=(1 - beta2) * live,
        epsilon=second_correction * group["eps"],
        decay=1 - rate * decay if decay else 1.0,
        step_size=rate * second_correction / (1 - beta1**count),
    )


@cache
def _tables(device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Tables on a device: from codes to numbers, and from the upper 16 bits of a number to its code. There are two of each,
    for the second moment, which has no sign, and for the first one. A device gets them once, because it waits for such copies.

    The rows of `blockwise.lookup` are in the order of signed integers; here they are in that of unsigned ones, which negative
    numbers come last in.
    """
    values = [_table(blockwise.values(signed=s), device) for s in (False, True)]
    codes = [
        _table(np.roll(blockwise.lookup(signed=s), -blockwise.OFFSET), device)
        for s in (False, True)
    ]
    return (values[0], values[1]), (codes[0], codes[1])


def _table(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
