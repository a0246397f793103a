"""The optimizers that a plan can name. Their state is allocated at the start; their rules equal
Optax's.

`new = old - rate · update`. Weight decay is decoupled (Loshchilov and Hutter 2019) and applies to
`Parameter.decays` only, except with SGD, where it joins the gradient. No step waits for the device.

In this project's own rules, a group's `live` is 1, or a device scalar that is 0 in a step to be
skipped. Learning rates and the shares of new values are multiplied by it, so a skipped step leaves
weights, state and counts unchanged, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from memconsole.plan.models.model import Parameter
from memconsole.plan.plan import OptimizerName, Plan
from memconsole.plan.training.recipe import weight_decay
from memconsole_torch.techniques.optimizer import offload
from memconsole_torch.techniques.optimizer.apollo import ApolloMini
from memconsole_torch.techniques.optimizer.compressed import Compressed
from memconsole_torch.techniques.optimizer.matrices import in_parts, matrices
from memconsole_torch.techniques.optimizer.muon import Muon
from memconsole_torch.techniques.optimizer.quantized_adam import QuantizedAdamW
from memconsole_torch.techniques.optimizer.rule import FusedAdamW, FusedSGD, OwnRule, Rule
from memconsole_trainer.techniques.adapters import trained_parameters
from memconsole_trainer.techniques.apollo import is_projected
from memconsole_trainer.techniques.blockwise import is_quantized
from memconsole_trainer.techniques.compressed import is_compressed
from memconsole_trainer.techniques.muon import is_orthogonalized

Total: TypeAlias = Callable[[Tensor], Tensor]
"""Adds up a device scalar over processes."""
_OF_MATRICES: dict[OptimizerName, Callable[[Parameter], bool]] = {
    "muon": is_orthogonalized,
    "apollo-mini": is_projected,
}
"""Rules for matrices, and whether a weight is one that they update."""
_TINY = float(torch.finfo(torch.float32).tiny)


class Weights(Protocol):
    """What an optimizer is made for: the weights of a model by name."""

    model: Any

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class CombinedOptimizer:
    """Several optimizers of different weights, used as one. Their states may be kept on the
    host."""

    def __init__(self, parts: Sequence[Rule], host: offload.HostState | None = None) -> None:
        self.parts = tuple(parts)
        self.host = host
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of every weight."""
        return {p: state for part in self.parts for p, state in part.state.items()}

    def step(self) -> None:
        """One update of every weight that has a gradient."""
        for part in self.parts:
            self.update(part)
        if self.host is not None:
            self.host.free()

    def update(self, part: Rule) -> None:
        """One update of one part."""
        with self.here(part):
            part.step()

    def here(self, part: Rule) -> AbstractContextManager[None]:
        """A context in which the part's state is on its device."""
        return nullcontext() if self.host is None else self.host.visit(part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)


Updating: TypeAlias = Rule | CombinedOptimizer


def create(plan: Plan, module: Weights) -> Updating:
    """The optimizer of `optimize.optimizer` over the trained weights."""
    trained = trained_parameters(plan, module.model)
    name = plan.optimize.optimizer
    device = next(module.parameters()).device
    waits = plan.optimize.optimizer_offload != "none" and not offload.same_memory(device)
    if waits or is_compressed(plan) or plan.optimize.optimizer_in_backward:
        host = _host(plan, device) if waits else None
        return CombinedOptimizer(
            [_alone(plan, module, p, i, host) for i, p in enumerate(trained)], host
        )
    if name not in _OF_MATRICES:
        return _over(plan, module, trained, name)
    rules: dict[OptimizerName, list[Parameter]] = {}
    for p in trained:
        rules.setdefault(_rule(name, p), []).append(p)
    return CombinedOptimizer(
        [_over(plan, module, weights, rule) for rule, weights in rules.items()]
    )


def _host(plan: Plan, device: torch.device) -> offload.HostState:
    """The store for offloaded states on the host. With updates inside the backward pass the next weight
    is not known, so no state is fetched ahead."""
    o = plan.optimize
    pinned = o.optimizer_offload != "cpu"
    return offload.HostState(device, pinned=pinned, ahead=not o.optimizer_in_backward)


def _alone(
    plan: Plan, module: Weights, parameter: Parameter, place: int, host: offload.HostState | None
) -> Rule:
    """The optimizer of one weight. Its state is narrowed and moved to `host` before the next one is
    created."""
    rule = _rule(plan.optimize.optimizer, parameter)
    optimizer = _over(plan, module, [parameter], rule)
    if is_compressed(plan) and optimizer.state:
        optimizer = Compressed(optimizer, plan.train.seed, place)
    if host is not None:
        host.take(optimizer)
    return optimizer


def _rule(name: OptimizerName, parameter: Parameter) -> OptimizerName:
    """The rule of one weight: a rule of matrices leaves the other weights to AdamW."""
    own = _OF_MATRICES.get(name)
    return name if own is None or own(parameter) else "adamw"


def _over(plan: Plan, module: Weights, weights: Sequence[Parameter], name: OptimizerName) -> Rule:
    """One update rule over some weights."""
    t = plan.train
    groups = _groups(plan, module, weights)
    device = next(module.parameters()).device
    fused = has_fused(device)
    optimizer: Rule
    slots: tuple[str, ...]
    if name == "adamw":
        betas = t.beta1, t.beta2
        if fused:
            optimizer = FusedAdamW(groups, betas, t.epsilon)
        else:
            optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=t.epsilon)
        slots = ("exp_avg", "exp_avg_sq")
        for p in _trained(optimizer):
            # torch keeps a step count per tensor: on the device for fused kernels, else on the host
            count = torch.zeros((), device=p.device if fused else "cpu")
            optimizer.state[p]["step"] = count
    elif name == "sgd":
        if fused:
            optimizer = FusedSGD(groups, t.beta1)
        else:
            optimizer = torch.optim.SGD(groups, lr=0.0, momentum=t.beta1)
        slots = ("momentum_buffer",) if t.beta1 else ()
    elif name == "lion":
        optimizer, slots = Lion(groups, (t.beta1, t.beta2)), ("momentum",)
    elif name == "muon":
        optimizer, slots = Muon(groups), ("momentum",)
    elif name == "adafactor":
        return Adafactor(groups)
    elif name == "apollo-mini":
        return ApolloMini(groups, (t.beta1, t.beta2), t.epsilon, t.seed)
    else:
        own = dict(module.named_parameters())
        narrow = [own[p.name] for p in weights if is_quantized(name, p)]
        return QuantizedAdamW(groups, (t.beta1, t.beta2), t.epsilon, narrow)
    for p in _trained(optimizer):
        optimizer.state[p].update({s: torch.zeros_like(p, dtype=torch.float32) for s in slots})
    return optimizer


def has_fused(device: torch.device) -> bool:
    """Whether torch has fused kernels for AdamW and SGD on this device. Elsewhere `torch.optim` is used."""
    return device.type in ("cpu", "cuda")


def set_learning_rate(optimizer: Updating, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def set_step(optimizer: Updating, step: int) -> None:
    """Set the count of updates to `step`, for rules that count them."""
    for group in optimizer.param_groups:
        group["count"] = step
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)


def slots(optimizer: Updating, module: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of optimizer state except the step count, named `<parameter>.<slot>`."""
    states = optimizer.state
    for name, parameter in module.named_parameters():
        for slot, value in states.get(parameter, {}).items():
            if slot != "step":
                yield f"{name}.{slot}", value


@torch.no_grad()
def clip(gradients: Sequence[Tensor], most: float, total: Total | None = None) -> Tensor:
    """Scale `gradients` in place to a global norm of at most `most` (0: do not clip).

    With `total`, `gradients` are only the rows that this process holds, and `total` adds up over processes.
    Returns the norm before clipping, a device scalar. Unlike torch's own clipping, this adds no epsilon to
    the norm.
    """
    whole = norm(gradients, total)
    if most:
        torch._foreach_mul_(list(gradients), most / whole.clamp(min=most))
    return whole


def norm(gradients: Sequence[Tensor], total: Total | None = None) -> Tensor:
    """Global norm of fp32 gradients, a device scalar. `total` adds up squares over processes."""
    own = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    return own if total is None else total(own.square()).sqrt()


def step_if(optimizer: Updating, finite: Tensor) -> None:
    """Take one step that changes nothing if `finite`, a bool device scalar, is false."""
    live = finite.float()
    several = (
        optimizer if isinstance(optimizer, CombinedOptimizer) else CombinedOptimizer([optimizer])
    )
    for part in several.parts:
        if "live" in part.defaults:
            for group in part.param_groups:
                group["live"] = live
        elif not finite:  # torch's rules cannot skip a step, so the host waits here
            continue
        several.update(part)


class Lion(OwnRule):
    """Sign of an interpolated momentum (Chen et al. 2023, algorithm 2)."""

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "weight_decay": 0.0, "live": 1.0})

    @torch.no_grad()
    def step(self) -> None:
        """One update, tensor by tensor, so that the temporary is that of one tensor."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rate, decay = group["lr"] * group["live"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p]["momentum"]
                update = momentum.mul(beta1).add_(p.grad, alpha=1 - beta1).sign_()
                p.mul_(1 - rate * decay).sub_(update.mul_(rate))
                momentum.lerp_(p.grad, (1 - beta2) * group["live"])


class Adafactor(OwnRule):
    """Second moments of a matrix as a row and a column (Shazeer and Stern 2018, algorithms 4 and
    5).

    It has no first moment. The decay is 1 - t^-0.8. Updates are clipped to RMS 1 and scaled by the
    weight's RMS, at least 1e-3. Each expert's matrix counts as a weight of its own. torch's own Adafactor
    reads two scalars per tensor back from the device at each step, and limits the rate by 1/sqrt(t).
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        settings = {"lr": 0.0, "weight_decay": 0.0, "count": 0, "live": 1.0, "rows": 0}
        super().__init__(groups, settings)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() == 2:
                    count = matrices(p, group)
                    sides = (count, p.shape[1]) if count > 1 else (p.shape[1],)
                    self.state[p]["row"] = p.new_zeros(len(p), dtype=torch.float32)
                    self.state[p]["column"] = p.new_zeros(sides, dtype=torch.float32)
                else:
                    self.state[p]["second"] = torch.zeros_like(p, dtype=torch.float32)

    @torch.no_grad()
    def step(self) -> None:
        """One update, tensor by tensor, of experts a few matrices at a time."""
        for group in self.param_groups:
            group["count"] = group["count"] + group["live"]
            renew = _renewed(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "second" in state:
                    _apply(p[None], _unfactored(p.grad, state["second"], renew)[None], group)
                    continue
                moments = state["row"][:, None], state["column"].view(-1, p.shape[1])
                parts = (in_parts(t, p, group) for t in (p, p.grad, *moments))
                for part, gradient, row, column in zip(*parts, strict=True):
                    _apply(part, _factored(gradient, row, column, renew), group)


def _unfactored(gradient: Tensor, second: Tensor, renew: Any) -> Tensor:
    """`gradient` divided by the root of its running second moment.

    All moments are 0 if every step so far was skipped; the limit keeps the quotients finite.
    """
    second.lerp_(gradient.square().add_(1e-30), renew)
    return gradient * second.clamp(min=_TINY).rsqrt()


def _factored(gradient: Tensor, row: Tensor, column: Tensor, renew: Any) -> Tensor:
    """The same for matrices (n, rows, columns), whose second moments are means of rows (n, rows, 1) and of columns
    (n, 1, columns)."""
    square = gradient.square().add_(1e-30)
    row.lerp_(square.mean(2, keepdim=True), renew)
    column.lerp_(square.mean(1, keepdim=True), renew)
    del square
    share = (row / row.mean(1, keepdim=True).clamp(min=_TINY)).clamp(min=_TINY)
    return (gradient * share.rsqrt()).mul_(column.clamp(min=_TINY).rsqrt())


def _apply(p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    """Update `n` tensors p (n, ...), each by its own part of `update`, which is overwritten."""
    rate = group["lr"] * group["live"]
    update.div_(_rms(update).clamp(min=1.0))
    update.mul_(_rms(p).clamp(min=1e-3))
    p.mul_(1 - rate * group["weight_decay"])
    p.sub_(update.mul_(rate))


def _renewed(group: dict[str, Any]) -> Any:
    """The weight t^-0.8 of a new square in Adafactor's second moments; 0 in a skipped step."""
    count, live = group["count"], group["live"]
    if isinstance(count, Tensor):
        return count.clamp(min=1.0) ** -0.8 * live
    return count**-0.8 * live


def _groups(plan: Plan, module: Weights, weights: Sequence[Parameter]) -> list[dict[str, Any]]:
    """The weights by their decay, and by the rows of a matrix if they hold several (0: they do not)."""
    own, share = dict(module.named_parameters()), weight_decay(plan)
    found: dict[tuple[float, int], list[nn.Parameter]] = {}
    for p in sorted(weights, key=lambda p: not p.decays):
        rows = p.matrix_shape[0] if p.matrices > 1 else 0
        found.setdefault((share if p.decays else 0.0, rows), []).append(own[p.name])
    return [
        {"params": params, "weight_decay": decay, "rows": rows}
        for (decay, rows), params in found.items()
    ]


def _trained(optimizer: Rule) -> Iterator[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _rms(x: Tensor) -> Tensor:
    """The root mean square of each of the tensors x (n, ...)."""
    axes = tuple(range(1, x.dim()))
    return torch.linalg.vector_norm(x, dim=axes, keepdim=True) / x[0].numel() ** 0.5
