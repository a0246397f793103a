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
    """`rule` for one weight, the trained one at `index`, with moments in bf16."""

    def __init__(self, rule: Rule, seed: int, index: int) -> None:
        # There is no `live` among the defaults: to skip a step, the caller does not call `step`.
        super().__init__(rule.param_groups, {"count": 0})
        self.rule, self._seed, self._index = rule, seed, index
        self.offset = 0
        """The index in the whole weight of the first element in `param_groups`, where a caller puts a slice of a weight."""
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
        """Update the slice of `length` elements from `start`: (length,), or (rows, columns) if the rule needs matrices."""
        row_shape = p.shape[1:] if isinstance(self.rule, Muon) else ()

        def slice_of(t: Tensor) -> Tensor:
            if length == t.numel():
                return t
            return t.view(-1)[start : start + length].view(-1, *row_shape)

        assert p.grad is not None
        state = self.state[p]
        weight = slice_of(p.detach())
        weight.grad = slice_of(p.grad.contiguous())
        moments = {n: slice_of(t) for n, t in state.items() if n != "step"}
        moments_fp32 = {n: t.float() for n, t in moments.items()}
        self.rule.param_groups = [{**group, "params": [weight]}]
        step = {"step": state["step"]} if "step" in state else {}
        self.rule.state = {weight: moments_fp32 | step}
        self.rule.step()
        self.rule.param_groups, self.rule.state = [], {}
        for slot, (name, moment) in enumerate(moments.items()):
            key = tensor_key(self._seed, group["count"], slot_index(self._index, slot))
            moment_fp32 = moments_fp32.pop(name).view(-1)
            round_into(moment.view(-1), moment_fp32, key, self.offset + start)
