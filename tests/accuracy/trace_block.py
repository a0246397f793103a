"""Traces one block of the decoder, or its final norm, at sizes from which each tensor's bytes can be factored.

Every size of the traced model is a prime times a small power of two. The factors of a tensor's bytes therefore show
which sizes it is a product of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memconsole.memory.activations.kernels import Kernels, Part
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace
from memconsole_torch import engine as torch_engine
from memconsole_torch.models import capped_attention, codes, expert_matrices, expert_products
from memconsole_torch.models.rotary import rotation_of
from memconsole_torch.techniques.activations import tiled_mlp
from memconsole_torch.techniques.optimizer import optimizers
from memconsole_torch.techniques.weights import precision
from memconsole_torch.tracing import trace_devices, trace_operators
from memconsole_torch.tracing.trace_cache import OperatorCache
from memconsole_torch.tracing.trace_liveness import Liveness
from memconsole_torch.tracing.trace_step import NoMemory, NoWeights, TracedSizes, without_data

TOLD = {
    "B": (11, 1),
    "S": (1613, 1),
    "P": (101, 16),
    "h": (1009, 64),
    "f": (2003, 64),
    "k": (31, 1),
    "g": (19, 1),
    "d": (13, 16),
    "w": (7, 32),
    "r": (37, 1),
    "c": (4003, 64),
    "q": (23, 1),
    "e": (43, 1),
    "t": (41, 1),
    "n": (47, 16),
    "m": (53, 16),
}
"""Each size's prime and its other factor. B rows, S positions, P positions padded to 16, h hidden, f intermediate, k
heads of keys, g heads of queries for each head of keys, d head size, w head size padded to 32, r rank of the adapters,
c numbers of a frozen matrix that are decoded at a time, q queries whose scores exist at a time if
they are capped or dropped, e experts, t experts of each token, n rows of an expert at a time, m tokens of the MLP at
a time."""
ROWS, LENGTH, HIDDEN, RANK, SLICE, QUERIES, EXPERT_ROWS, TILE = (
    math.prod(TOLD[name]) for name in "BShrcqnm"
)
TILES = 2
"""Tiles of the MLP that are traced: the second one adds to the sums of the first, as all others do."""


class AmbiguousSizeError(ValueError):
    """The bytes of a tensor are not a whole multiple of a product of sizes."""


class Term(NamedTuple):
    """`factor` times the product of sizes, for example "B S h h"."""

    factor: int
    sizes: str


@cache
def term(count: int) -> Term:
    """The product of sizes that gives a number of bytes, or a side of a weight. Raises `AmbiguousSizeError`."""
    names, factor = [], count
    for name, (prime, unit) in TOLD.items():
        while count and factor % prime == 0:
            factor //= prime
            names.append((name, unit))
    units = math.prod(unit for _, unit in names)
    if factor % units:
        raise AmbiguousSizeError(f"{count} is no multiple of {' '.join(name for name, _ in names)}")
    return Term(factor // units, " ".join(name for name, _ in names))


class Completed(NamedTuple):
    """A weight's gradient at the moment at which it is complete."""

    event: int
    """The number of events before it."""
    storage: int
    """Its index among the storages."""
    shape: tuple[int, ...]


class Trace(NamedTuple):
    """The allocations and releases of a block, in order."""

    live: Liveness
    completed: tuple[Completed, ...]
    recorded: bool
    """Whether there is a backward pass."""


class BlockTracer:
    """Traces blocks. It keeps the results of operators from one trace to the next."""

    def __init__(self) -> None:
        self._fake = FakeTensorMode()
        self._run = OperatorCache(self._fake)

    def trace(self, a: Architecture, k: Kernels, part: Part) -> Trace:
        """One block of the shape of `a`, whatever its sizes. The phases are "forward", "cast" (after it, while copies
        of weights are still there), "kept", "backward" and "end"."""
        a, plan = told_model(a), told_plan(k)
        live = Liveness(
            overrides=trace_operators.overrides() | trace_operators.device_overrides(k.kind),
            workspaces=trace_operators.workspaces(k.kind, True),
        )
        with _emulating(k), self._fake:
            engine = torch_engine.TorchEngine(plan, torch.device("cpu"))
            engine._memory = NoMemory()
            engine.build(plan, a, 10, NoWeights())
            decoder = engine.module
            live._run = self._run
            with live:
                for weight in (*decoder.parameters(), *decoder.buffers()):
                    live.declare(weight, "weights")
                    live.ignore(weight)
                # Tables and masks belong to the whole step.
                around: tuple[Any, ...] = ()
                body: Any = decoder.norm
                if "block" in part:
                    body, around = decoder.layers[0], _around(a, k, live)
                if part.startswith("evaluated"):
                    _evaluate(live, body, around, plan)
                    return Trace(live, (), recorded=False)
                drawing = engine._draws.of(0, 0) if engine._draws is not None else nullcontext()
                with drawing:
                    return Trace(live, _train(live, body, around, plan, k), recorded=True)


def told_model(a: Architecture) -> Architecture:
    """A decoder of one block with the operations of `a`, at the sizes of `TOLD`."""
    heads = TOLD["k"][0] * (TOLD["g"][0] if a.heads > a.kv_heads else 1)
    return msgspec.structs.replace(
        a,
        vocab_size=128,
        hidden_size=HIDDEN,
        layers=1,
        heads=heads,
        kv_heads=TOLD["k"][0],
        head_size=math.prod(TOLD["d"]),
        intermediate_size=math.prod(TOLD["f"]),
        experts=math.prod(TOLD["e"]) if a.experts else 0,
        experts_per_token=math.prod(TOLD["t"]) if a.experts else 0,
        max_positions=LENGTH,
        sliding_window=None,
        auxiliary_rows=0,
        diagnostic_classes=0,
    )


def told_plan(k: Kernels) -> Plan:
    """A plan whose block runs `k`."""
    name = "fp32" if k.compute == 4 else "bf16-sr" if k.rounded else "bf16"
    return replace(
        Plan(),
        {
            "device.name": "cpu",
            "data.sequence_length": LENGTH,
            "train.batch_size": ROWS,
            "optimize.precision": name,
            "optimize.gradient_checkpointing": k.checkpointing,
            "optimize.optimizer": "sgd",
            "optimize.lora_rank": RANK if k.rank else 0,
            "optimize.freeze_base": k.frozen,
            "optimize.base_storage": k.storage,
            "optimize.tiled_mlp": k.tile > 0,
            "optimize.accumulation_steps": 2 if k.summed else 1,
            "train.attention_dropout": 0.1 if k.dropped else 0.0,
        },
    )


@contextmanager
def _emulating(k: Kernels) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(trace_devices.emulated(k.kind, aligned=k.mask != "padded"))
        stack.enter_context(without_data(TracedSizes(ROWS, LENGTH)))
        stack.enter_context(patch.object(codes, "CPU_SLICE", SLICE))
        stack.enter_context(patch.object(capped_attention, "QUERIES", QUERIES))
        stack.enter_context(patch.object(expert_products, "ROWS", EXPERT_ROWS))
        stack.enter_context(patch.object(tiled_mlp, "tile_tokens", lambda _: TILE))
        stack.enter_context(patch.object(tiled_mlp, "tiles", _whole_tiles))
        if k.single_experts:
            stack.enter_context(patch.object(expert_matrices, "aligned", lambda *_: False))
        if k.frozen and not k.rank:  # no optimizer accepts that nothing is trained
            stack.enter_context(patch.object(optimizers, "create", lambda *_: None))
        yield


def _whole_tiles(tokens: int, most: int) -> list[slice]:
    """Replaces `tiled_mlp.tiles`: a few tiles of `most` tokens, whatever the number of `tokens`."""
    return [slice(number * most, (number + 1) * most) for number in range(TILES)]


def _around(a: Architecture, k: Kernels, live: Liveness) -> tuple[Any, Any]:
    """The rotary tables and the mask that a block is given, not counted."""
    rotary = rotation_of(a, LENGTH, local=False, device=torch.device("cpu"))
    mask = None
    if k.mask:
        shape = (LENGTH, LENGTH) if k.mask == "window" else (ROWS, 1, LENGTH, LENGTH)
        mask = torch.empty(shape, dtype=torch.float32 if k.compute == 4 else torch.bfloat16)
    for tensor in (*(rotary or ()), *(() if mask is None else (mask,))):
        live.ignore(tensor)
    return rotary, mask


def _evaluate(live: Liveness, body: Any, around: tuple[Any, ...], plan: Plan) -> None:
    live.phase = "forward"
    with torch.no_grad(), precision.forward_context(torch.device("cpu"), plan.optimize.precision):
        x = _stream()
        y = body(x, *around)
    live.phase = "end"
    del x, y


def _train(
    live: Liveness, body: Any, around: tuple[Any, ...], plan: Plan, k: Kernels
) -> tuple[Completed, ...]:
    completed: list[Completed] = []

    def complete(weight: Tensor) -> None:
        assert weight.grad is not None
        live.declare(weight.grad, "gradients")
        at = live.storages.index(live.storage(weight.grad))
        completed.append(Completed(len(live.events), at, tuple(weight.shape)))

    for weight in body.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(complete)

    class Below(torch.autograd.Function):
        """Makes the input of the block. Its gradient arrives last."""

        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return _stream()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            live.phase = "end"
            return torch.zeros(1)

    class Above(torch.autograd.Function):
        """Reads the block's output, and makes its gradient."""

        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.dtype = y.dtype
            return torch.empty(1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.empty(ROWS, LENGTH, HIDDEN, dtype=ctx.dtype)

    leaf, one = torch.empty(1, requires_grad=not k.first), torch.empty(1)
    for tensor in leaf, one:
        live.ignore(tensor)
    live.phase = "forward"
    with precision.forward_context(torch.device("cpu"), plan.optimize.precision):
        x = Below.apply(leaf)
        y = body(x, *around)
        del x
        live.phase = "cast"
    end = Above.apply(y)
    live.ignore(end)
    del y
    live.phase = "kept"
    live.phase = "backward"
    if end.requires_grad:
        end.backward(one)
    live.phase = "end"
    return tuple(completed)


def _stream() -> Tensor:
    return torch.empty(ROWS, LENGTH, HIDDEN)
