"""Weights kept only in bfloat16, as `memconsole_trainer.techniques.rounding` specifies, with any
optimizer.

The optimizer updates fp32 slices of a weight with the matching slices of its state, or whole
matrices if its rule needs them. Each slice is rounded back before the next one is widened. Random bits
exist for one slice at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memconsole.plan.plan import Plan
from memconsole_torch.kernels import launch
from memconsole_torch.techniques.optimizer.adafactor import Adafactor
from memconsole_torch.techniques.optimizer.compressed import Compressed
from memconsole_torch.techniques.optimizer.matrices import rows_at_a_time
from memconsole_torch.techniques.optimizer.muon import Muon
from memconsole_torch.techniques.optimizer.optimizers import CombinedOptimizer, Optimizer
from memconsole_torch.techniques.optimizer.quantized_adam import Buffers, QuantizedAdamW
from memconsole_torch.techniques.optimizer.rule import Rule
from memconsole_torch.techniques.optimizer.stochastic import CPU_SLICE, DEVICE_SLICE, round_into
from memconsole_torch.techniques.weights.precision import COMPUTE
from memconsole_trainer.techniques.adapters import stored_narrow
from memconsole_trainer.techniques.blockwise import BLOCK as QUANTIZED
from memconsole_trainer.techniques.rounding import is_rounded, tensor_key


def narrow(plan: Plan, frozen: Collection[str], module: nn.Module) -> None:
    """Set the storage type of the weights of `module`, which has shapes only: 16 bits for the
    `frozen` ones of a plan in 16 bits, and for all of them with bf16-sr. Others stay fp32."""
    own, apart = dict(module.named_parameters()), frozenset(frozen)
    for p in module.model.parameters():
        if is_rounded(plan, p) or (p.name in apart and stored_narrow(plan, p)):
            own[p.name].data = own[p.name].data.to(COMPUTE[plan.optimize.precision])
    if plan.optimize.precision == "bf16-sr":
        widen_lookups(module)


def widen_lookups(module: nn.Module) -> None:
    """Let lookups in tables that are in 16 bits add up their gradients in fp32."""
    for name in ("embedding", "positions"):
        table = getattr(module, name, None)
        if table is not None:
            table.forward = _Lookup(table)


class _Lookup:
    """Looks up rows of a 16-bit table in fp32, so that their gradients are summed in fp32."""

    def __init__(self, table: nn.Embedding) -> None:
        self._table = table

    def __call__(self, tokens: Tensor) -> Tensor:
        rows: Tensor = _WideRows.apply(self._table.weight, tokens)
        return rows


class _WideRows(torch.autograd.Function):
    """The lookup. The gradient of a frequent token, or of a position at which many documents have a token, is a
    sum of many terms; in bf16 the later terms would be rounded away."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = table.shape[0]
        return F.embedding(tokens, table).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        whole = torch.ops.aten.embedding_dense_backward(gradient, tokens, ctx.rows, -1, False)
        return whole, None


class Rounded(CombinedOptimizer):
    """Optimizers of weights, some of them stored in bf16."""

    def __init__(self, plan: Plan, module: nn.Module, inner: Optimizer) -> None:
        several = inner if isinstance(inner, CombinedOptimizer) else CombinedOptimizer([inner])
        super().__init__(several.parts, several.host)
        self._seed = plan.train.seed
        own = dict(module.named_parameters())
        named = enumerate(module.model.parameters())
        self._index = {own[p.name]: i for i, p in named}
        if plan.optimize.accumulation_steps > 1:
            for p in self.state:
                p.grad_dtype = torch.float32
        self._factor: Tensor | None = None
        self.number = 0
        """Number of the current step, which the random bits depend on."""

    def take(self, gradients: Sequence[Tensor], most: float) -> Tensor:
        """Take one step with `gradients` clipped in fp32 to a global norm of `most` (0: not
        clipped).

        Returns the norm before clipping, a device scalar.
        """
        norm = norm_of(gradients)
        self._factor = most / norm.clamp(min=most) if most else None
        self.step()
        self._factor = None
        return norm

    @torch.no_grad()
    def update(self, part: Rule) -> None:
        """One update of the weights of one part."""
        with self.state_on_device(part):
            self._update_all(part)

    def _update_all(self, part: Rule) -> None:
        groups, states = part.param_groups, part.state
        counts = [group.get("count") for group in groups]
        device = next(iter(states)).device
        if isinstance(part, QuantizedAdamW) and not launch.runs_on(device):
            part.buffers = Buffers(device)
        try:
            for group, count in zip(groups, counts, strict=True):
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(part, group, count, states, p)
        finally:
            part.param_groups, part.state = groups, states
            if isinstance(part, QuantizedAdamW):
                part.buffers = None

    def _update(
        self, part: Rule, group: dict[str, Any], count: Any, states: Any, p: Tensor
    ) -> None:
        key = tensor_key(self._seed, self.number, self._index[p])
        narrow, state = p.dtype == torch.bfloat16, states[p]
        assert p.grad is not None
        if _looks_at_matrices(part):
            weight, gradient = p, p.grad
            size = rows_at_a_time(p, group) if p.dim() > 1 else len(p)
        else:
            weight, gradient = p.view(-1), p.grad.reshape(-1)
            size = min(len(weight), CPU_SLICE if p.device.type == "cpu" else DEVICE_SLICE)
        for start in range(0, len(weight), size):
            cut = slice(start, start + size)
            wide = weight[cut].float()
            wide.grad = gradient[cut].float()
            if self._factor is not None:
                wide.grad.mul_(self._factor)
            if count is not None:
                group["count"] = count
            own = {name: _cut(name, value, cut, weight) for name, value in state.items()}
            part.param_groups, part.state = [{**group, "params": [wide]}], {wide: own}
            if isinstance(part, Compressed):
                part.begins = weight[:start].numel()
            part.step()
            if count is not None:
                group["count"] = part.param_groups[0]["count"]
            part.param_groups, part.state = [], {}
            wide.grad = None
            if narrow:
                round_into(weight[cut].view(-1), wide.view(-1), key, weight[:start].numel())
            # A weight that is already fp32 was updated in place.
            del wide
        if "step" in state:
            state["step"].copy_(own["step"])


def _looks_at_matrices(part: Rule) -> bool:
    """Whether the rule needs whole matrices instead of any elements."""
    return isinstance(part.rule if isinstance(part, Compressed) else part, (Adafactor, Muon))


def _cut(name: str, value: Any, cut: slice, weight: Tensor) -> Any:
    """The part of a weight's state that belongs to the rows `cut` of `weight`. All slices share the step count."""
    if name == "step":
        return value.clone()
    if name.endswith("_scales"):
        return value[cut.start // QUANTIZED : -(-cut.stop // QUANTIZED)]
    rows = value if weight.dim() > 1 else value.view(-1)
    # Adafactor's means of columns have one row for each matrix.
    return rows[cut.start * len(rows) // len(weight) : cut.stop * len(rows) // len(weight)]


@torch.no_grad()
def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    """Global norm of gradients, some of them in bf16: an fp32 device scalar. No whole gradient is
    widened."""
    norms = []
    for gradient in gradients:
        flat = gradient.view(-1)
        size = CPU_SLICE if flat.device.type == "cpu" else flat.numel()
        for start in range(0, flat.numel(), size):
            part = flat[start : start + size]
            norms.append(torch.linalg.vector_norm(part, dtype=torch.float32))
    return torch.linalg.vector_norm(torch.stack(norms))
