"""Moments stored in bfloat16, as `memconsole_trainer.techniques.compressed` specifies, around an
fp32 update rule.

The rule is applied to slices of a weight, or to whole matrices if the rule needs them. A slice's
moments are widened, updated with the weight, and rounded back before the next slice is widened.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memconsole_torch.techniques.optimizer.matrices import rows_at_a_time
from memconsole_torch.techniques.optimizer.muon import Muon
from memconsole_torch.techniques.optimizer.rule import BaseRule, Rule
from memconsole_torch.techniques.optimizer.stochastic import CPU_SLICE, DEVICE_SLICE, round_into
from memconsole_trainer.techniques.compressed import slot_index
from memconsole_trainer.techniques.rounding import tensor_key


class Compressed(BaseRule):
    """`rule` for one weight, the `place`-th trained one, with moments in bf16."""

    def __init__(self, rule: Rule, seed: int, place: int) -> None:
        # The inner rules cannot skip a step: to skip one, the caller does not call `step`.
        super().__init__(rule.param_groups, {"count": 0})
        self.rule, self._seed, self._place = rule, seed, place
        self.begins = 0
        """Offset in the weight of the tensor that is updated, if that is a slice of it."""
        for p, state in rule.state.items():
            moments = {n: t.bfloat16() for n, t in state.items() if n != "step"}
            self.state[p] = {**state, **moments}
        rule.state.clear()

    @torch.no_grad()
    def step(self) -> None:
        """One update, slice by slice."""
        (group,) = self.param_groups
        (p,) = group["params"]
        if p.grad is None:
            return
        state = self.state[p]
        count = state.get("step")
        size = self._slice_size(p, group)
        for start in range(0, p.numel(), size):
            if count is not None:
                state["step"] = count.clone()  # all slices belong to the same step
            self._update(p, group, start, min(size, p.numel() - start))
        group["count"] += 1

    def _slice_size(self, p: Tensor, group: dict[str, Any]) -> int:
        """Elements per slice: those of whole matrices if the rule needs them."""
        if isinstance(self.rule, Muon):
            return rows_at_a_time(p, group) * p.shape[1]
        return min(p.numel(), CPU_SLICE if p.device.type == "cpu" else DEVICE_SLICE)

    def _update(self, p: Tensor, group: dict[str, Any], start: int, length: int) -> None:
        """Update the slice of `length` elements from `start`."""
        shape = p.shape[1:] if isinstance(self.rule, Muon) else ()

        def cut(t: Tensor) -> Tensor:
            if length == t.numel():
                return t
            return t.view(-1)[start : start + length].view(-1, *shape)

        assert p.grad is not None
        state = self.state[p]
        weight = cut(p.detach())
        weight.grad = cut(p.grad.contiguous())
        moments = {n: cut(t) for n, t in state.items() if n != "step"}
        wide = {n: t.float() for n, t in moments.items()}
        self.rule.param_groups = [{**group, "params": [weight]}]
        step = {"step": state["step"]} if "step" in state else {}
        self.rule.state = {weight: wide | step}
        self.rule.step()
        self.rule.param_groups, self.rule.state = [], {}
        for slot, (name, narrow) in enumerate(moments.items()):
            key = tensor_key(self._seed, group["count"], slot_index(self._place, slot))
            round_into(narrow.view(-1), wide.pop(name).view(-1), key, self.begins + start)
