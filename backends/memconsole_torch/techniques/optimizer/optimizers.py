"""The optimizers that a plan can name: how they are created, clipped and stepped.

Every rule computes `new = old - rate · update`, with the same results as Optax. State is allocated at the start. Weight
decay is decoupled (Loshchilov and Hutter 2019) and applies to `Parameter.decays` only, except with SGD, where it is added to
the gradient. No step waits for the device.

A step can be skipped without waiting to know whether it is. In this project's own rules, a group's `live` is 1, or a device
scalar that is 0 in a step to be skipped. The learning rate and the weight of every new moment are multiplied by it, so that a
skipped step leaves weights, state and counts unchanged, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from memconsole.plan.models.model import Parameter
from memconsole.plan.plan import OptimizerName, Plan
from memconsole.plan.training.recipe import weight_decay
from memconsole_torch.techniques.optimizer import offload
from memconsole_torch.techniques.optimizer.adafactor import Adafactor
from memconsole_torch.techniques.optimizer.apollo import ApolloMini
from memconsole_torch.techniques.optimizer.compressed import Compressed
from memconsole_torch.techniques.optimizer.lion import Lion
from memconsole_torch.techniques.optimizer.muon import Muon
from memconsole_torch.techniques.optimizer.quantized_adam import QuantizedAdamW
from memconsole_torch.techniques.optimizer.rule import FusedAdamW, FusedSGD, Rule
from memconsole_trainer.techniques.adapters import trained_parameters
from memconsole_trainer.techniques.apollo import is_projected
from memconsole_trainer.techniques.blockwise import is_quantized
from memconsole_trainer.techniques.compressed import is_compressed
from memconsole_trainer.techniques.muon import is_orthogonalized

ProcessSum: TypeAlias = Callable[[Tensor], Tensor]
"""Adds up a device scalar over processes."""
_MATRIX_RULES: dict[OptimizerName, Callable[[Parameter], bool]] = {
    "muon": is_orthogonalized,
    "apollo-mini": is_projected,
}
"""Rules of matrices, and whether such a rule updates a weight."""


class Weights(Protocol):
    """What an optimizer is made for: the weights of a model by name."""

    model: Any

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class CombinedOptimizer:
    """Several update rules of different weights, used as one. `host` keeps their states in host memory, if it is given."""

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
        """One update of the weights of one part."""
        with self.state_on_device(part):
            part.step()

    def state_on_device(self, part: Rule) -> AbstractContextManager[None]:
        """A context in which the state of one part is on its device."""
        return nullcontext() if self.host is None else self.host.on_device(part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)


Optimizer: TypeAlias = Rule | CombinedOptimizer


def create(plan: Plan, module: Weights) -> Optimizer:
    """The optimizer of `optimize.optimizer` over the trained weights."""
    trained = trained_parameters(plan, module.model)
    name = plan.optimize.optimizer
    device = next(module.parameters()).device
    offloaded = plan.optimize.optimizer_offload != "none" and not offload.same_memory(device)
    if offloaded or is_compressed(plan) or plan.optimize.optimizer_in_backward:
        host = _host(plan, device) if offloaded else None
        rules = [_rule_of_one(plan, module, p, index, host) for index, p in enumerate(trained)]
        return CombinedOptimizer(rules, host)
    if name not in _MATRIX_RULES:
        return _rule_of(plan, module, trained, name)
    weights_by_name: dict[OptimizerName, list[Parameter]] = {}
    for p in trained:
        weights_by_name.setdefault(_rule_name(name, p), []).append(p)
    return CombinedOptimizer(
        [_rule_of(plan, module, weights, rule) for rule, weights in weights_by_name.items()]
    )


def _host(plan: Plan, device: torch.device) -> offload.HostState:
    """The store for offloaded states on the host. With updates inside the backward pass it is not known which weight is next,
    so no state is fetched ahead."""
    o = plan.optimize
    pinned = o.optimizer_offload != "cpu"
    return offload.HostState(device, pinned=pinned, ahead=not o.optimizer_in_backward)


def _rule_of_one(
    plan: Plan, module: Weights, parameter: Parameter, index: int, host: offload.HostState | None
) -> Rule:
    """The rule of one weight, the trained one at `index`. Its state is compressed and moved to `host` before that of the
    next weight is allocated."""
    rule = _rule_of(plan, module, [parameter], _rule_name(plan.optimize.optimizer, parameter))
    if is_compressed(plan) and rule.state:
        rule = Compressed(rule, plan.train.seed, index)
    if host is not None and rule.state:
        host.add(rule)
    return rule


def _rule_name(name: OptimizerName, parameter: Parameter) -> OptimizerName:
    """The rule of one weight: a rule of matrices leaves all other weights to AdamW."""
    updates = _MATRIX_RULES.get(name)
    return name if updates is None or updates(parameter) else "adamw"


def _rule_of(
    plan: Plan, module: Weights, weights: Sequence[Parameter], name: OptimizerName
) -> Rule:
    """One update rule over some weights, with its state."""
    t = plan.train
    groups, betas = _groups(plan, module, weights), (t.beta1, t.beta2)
    fused = has_fused(next(module.parameters()).device)
    rule: Rule
    if name == "adamw":
        if fused:
            rule = FusedAdamW(groups, betas, t.epsilon)
        else:
            rule = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=t.epsilon)
        for p in _weights_of(rule):
            # torch keeps a step count per tensor: on the device for fused kernels, else on the host.
            rule.state[p]["step"] = torch.zeros((), device=p.device if fused else "cpu")
        return _allocate(rule, "exp_avg", "exp_avg_sq")
    if name == "sgd":
        if fused:
            rule = FusedSGD(groups, t.beta1)
        else:
            rule = torch.optim.SGD(groups, lr=0.0, momentum=t.beta1)
        return _allocate(rule, "momentum_buffer") if t.beta1 else rule
    if name == "lion":
        return _allocate(Lion(groups, betas), "momentum")
    if name == "muon":
        return _allocate(Muon(groups), "momentum")
    if name == "apollo-mini":
        return ApolloMini(groups, betas, t.epsilon, t.seed)
    if name == "adafactor":
        return Adafactor(groups)
    named = dict(module.named_parameters())
    quantized = [named[p.name] for p in weights if is_quantized(name, p)]
    return QuantizedAdamW(groups, betas, t.epsilon, quantized)


def _allocate(rule: Rule, *slots: str) -> Rule:
    """Give every weight of a rule an fp32 tensor of zeros for each slot of its state."""
    for p in _weights_of(rule):
        rule.state[p].update({s: torch.zeros_like(p, dtype=torch.float32) for s in slots})
    return rule


def has_fused(device: torch.device) -> bool:
    """Whether torch has fused kernels for AdamW and SGD on this device. Elsewhere `torch.optim` is used."""
    return device.type in ("cpu", "cuda")


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of all weights."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def set_step(optimizer: Optimizer, step: int) -> None:
    """Set the count of updates to `step`, for rules that count them."""
    for group in optimizer.param_groups:
        group["count"] = step
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)


def slots(optimizer: Optimizer, module: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of optimizer state except the step count, named `<parameter>.<slot>`."""
    states = optimizer.state
    for name, parameter in module.named_parameters():
        for slot, value in states.get(parameter, {}).items():
            if slot != "step":
                yield f"{name}.{slot}", value


@torch.no_grad()
def clip(
    gradients: Sequence[Tensor], max_norm: float, process_sum: ProcessSum | None = None
) -> Tensor:
    """Scale `gradients` in place so that their global norm is at most `max_norm` (0: do not clip).

    With `process_sum`, `gradients` are only the rows that this process holds. Returns the norm before clipping, a device
    scalar. Unlike torch's own clipping, this adds no epsilon to the norm.
    """
    norm = global_norm(gradients, process_sum)
    if max_norm:
        torch._foreach_mul_(list(gradients), max_norm / norm.clamp(min=max_norm))
    return norm


def global_norm(gradients: Sequence[Tensor], process_sum: ProcessSum | None = None) -> Tensor:
    """The norm of all fp32 gradients together, a device scalar. `process_sum` adds up the squares of several processes."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    return norm if process_sum is None else process_sum(norm.square()).sqrt()


def step_if(optimizer: Optimizer, finite: Tensor) -> None:
    """Take one step, which changes nothing if `finite`, a bool device scalar, is false."""
    live = finite.float()
    if not isinstance(optimizer, CombinedOptimizer):
        optimizer = CombinedOptimizer([optimizer])
    for part in optimizer.parts:
        if "live" in part.defaults:
            for group in part.param_groups:
                group["live"] = live
        elif not finite:  # torch.optim and compressed moments cannot skip a step: the host waits
            continue
        optimizer.update(part)
    if optimizer.host is not None:
        optimizer.host.free()


def _groups(plan: Plan, module: Weights, weights: Sequence[Parameter]) -> list[dict[str, Any]]:
    """Groups of weights with the same weight decay and, for weights that hold several matrices, the same number of rows in
    each (`rows`; 0 for other weights)."""
    named, decay = dict(module.named_parameters()), weight_decay(plan)
    groups: dict[tuple[float, int], list[nn.Parameter]] = {}
    for p in sorted(weights, key=lambda p: not p.decays):
        rows = p.matrix_shape[0] if p.matrices > 1 else 0
        groups.setdefault((decay if p.decays else 0.0, rows), []).append(named[p.name])
    return [
        {"params": params, "weight_decay": decay, "rows": rows}
        for (decay, rows), params in groups.items()
    ]


def _weights_of(rule: Rule) -> Iterator[nn.Parameter]:
    return (p for group in rule.param_groups for p in group["params"])
