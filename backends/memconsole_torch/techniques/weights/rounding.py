"""Weights kept only in bfloat16, as `memconsole_trainer.techniques.rounding` specifies, with any
optimizer.

The optimizer updates an fp32 copy of one slice of a weight at a time, or of whole matrices if its rule needs them. Each
slice is rounded back to bfloat16 before the next one is copied. Random bits exist for one slice at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memconsole.plan.plan import Plan
from memconsole_torch.kernels import launch
from memconsole_torch.techniques.optimizer.adafactor import Adafactor
from memconsole_torch.techniques.optimizer.apollo import ApolloMini
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


def set_storage_dtype(plan: Plan, frozen: Collection[str], module: nn.Module) -> None:
    """Set the dtype in which the weights of `module` are stored, before they have data: 16 bits for the
    `frozen` ones of a plan in 16 bits, and with bf16-sr for all that `is_rounded` names. Others stay fp32."""
    named, frozen = dict(module.named_parameters()), frozenset(frozen)
    for p in module.model.parameters():
        if is_rounded(plan, p) or (p.name in frozen and stored_narrow(plan, p)):
            named[p.name].data = named[p.name].data.to(COMPUTE[plan.optimize.precision])
    if plan.optimize.precision == "bf16-sr":
        widen_lookups(module)


def widen_lookups(module: nn.Module) -> None:
    """Make lookups in the 16-bit tables of embeddings and positions add up their gradients in fp32."""
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
    """Rows of a 16-bit table in fp32, and an fp32 gradient of the table.

    The gradient of a frequent token, or of a position at which many documents have a token, is a sum of many terms. In bf16
    the later terms would be rounded away.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = table.shape[0]
        return F.embedding(tokens, table).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        table_grad = torch.ops.aten.embedding_dense_backward(gradient, tokens, ctx.rows, -1, False)
        return table_grad, None


class Rounded(CombinedOptimizer):
    """Optimizers of weights, some of them stored in bf16."""

    def __init__(self, plan: Plan, module: nn.Module, inner: Optimizer) -> None:
        if not isinstance(inner, CombinedOptimizer):
            inner = CombinedOptimizer([inner])
        super().__init__(inner.parts, inner.host)
        self._seed = plan.train.seed
        named = dict(module.named_parameters())
        # A frozen weight that is stored in codes is no parameter of the module.
        parameters = enumerate(module.model.parameters())
        self._index = {named[p.name]: i for i, p in parameters if p.name in named}
        if plan.optimize.accumulation_steps > 1:
            for p in (p for group in self.param_groups for p in group["params"]):
                p.grad_dtype = torch.float32
        self._clip_factor: Tensor | None = None
        self.number = 0
        """Number of the current step, which the random bits depend on."""

    def take(self, gradients: Sequence[Tensor], max_norm: float) -> Tensor:
        """Take one step with `gradients` clipped in fp32 to a global norm of `max_norm` (0: not
        clipped).

        Returns the norm before clipping, a device scalar.
        """
        norm = norm_of(gradients)
        self._clip_factor = max_norm / norm.clamp(min=max_norm) if max_norm else None
        self.step()
        self._clip_factor = None
        return norm

    @torch.no_grad()
    def update(self, part: Rule) -> None:
        """One update of the weights of one part."""
        with self.state_on_device(part):
            self._update_all(part)

    def _update_all(self, part: Rule) -> None:
        """Update the weights of a rule slice by slice. The rule is given one slice at a time in place of its own groups and
        state, which it gets back at the end."""
        groups, states = part.param_groups, part.state
        counts = [group.get("count") for group in groups]
        device = groups[0]["params"][0].device
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
        """Update the weight p of `group`. Every slice begins with the group's `count` of updates before the step."""
        key = tensor_key(self._seed, self.number, self._index[p])
        is_bf16, state = p.dtype == torch.bfloat16, states[p]
        assert p.grad is not None
        if _needs_matrices(part):
            weight, gradient = p, p.grad
            size = rows_at_a_time(p, group) if p.dim() > 1 else len(p)
        else:
            weight, gradient = p.view(-1), p.grad.reshape(-1)
            size = min(len(weight), CPU_SLICE if p.device.type == "cpu" else DEVICE_SLICE)
        for start in range(0, len(weight), size):
            rows = slice(start, start + size)
            weight_fp32 = weight[rows].float()
            weight_fp32.grad = gradient[rows].float()
            if self._clip_factor is not None:
                weight_fp32.grad.mul_(self._clip_factor)
            if count is not None:
                group["count"] = count
            slice_state = {n: _state_slice(n, value, rows, weight) for n, value in state.items()}
            part.param_groups = [{**group, "params": [weight_fp32]}]
            part.state = {weight_fp32: slice_state}
            offset = start * math.prod(weight.shape[1:])
            if isinstance(part, Compressed):
                part.offset = offset
            part.step()
            if count is not None:
                group["count"] = part.param_groups[0]["count"]
            part.param_groups, part.state = [], {}
            weight_fp32.grad = None
            if is_bf16:
                round_into(weight[rows].view(-1), weight_fp32.view(-1), key, offset)
            # A weight that is already fp32 was updated in place.
            del weight_fp32
        if "step" in state:
            state["step"].copy_(slice_state["step"])


def _needs_matrices(part: Rule) -> bool:
    """Whether the rule updates whole matrices, so that a slice must not cut one."""
    return isinstance(
        part.rule if isinstance(part, Compressed) else part, (Adafactor, ApolloMini, Muon)
    )


def _state_slice(name: str, value: Any, rows: slice, weight: Tensor) -> Any:
    """The part of the state `value` that belongs to `rows` of `weight`. Every slice gets a copy of the step count, because
    all begin with the same one."""
    if name == "step":
        return value.clone()
    if name.endswith("_scales"):
        return value[rows.start // QUANTIZED : -(-rows.stop // QUANTIZED)]
    state = value if weight.dim() > 1 else value.view(-1)
    # Adafactor's means of columns have one row for each matrix.
    return state[rows.start * len(state) // len(weight) : rows.stop * len(state) // len(weight)]


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
