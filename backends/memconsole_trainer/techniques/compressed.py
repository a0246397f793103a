"""Optimizer state that waits in bfloat16 (`optimize.optimizer_offload = compressed`): the one specification of it.

- A step widens the moments of a slice of a weight to fp32, updates moments and weight as it would without, and
  stores the new moments in bf16. The weight is updated by the moments before they are rounded.
- Rounding is stochastic, as `rounding` specifies. To nearest, a second moment would stand still: a step changes
  it by a share of 1 - beta2, 0.001 at 0.999, and a change below 2^-9 would be lost. Stochastically rounded it
  is right on average. A rounding's relative error has a deviation of at most 2^-8, and the last 1 / (1 - beta2²)
  of them count, so that of a second moment at rest has one of at most 2^-8 / sqrt(1 - beta2²): 1.3 % at 0.95,
  8.7 % at 0.999, and half that in the update, which divides by its root.
- Bits come from the key threefry((seed's lower, upper 32 bits), (updates before, 2^31 + 2 i + slot)) for the
  weight at place i of `adapters.trained_parameters`, slot 0 the first or only moment and 1 the second. The
  2^31 keeps them apart from those that round weights. A skipped update is none, and changes no state.
"""

from __future__ import annotations

from memconsole.plan.plan import Plan

SLOTS = 2


def is_compressed(plan: Plan) -> bool:
    """Whether moments wait in bf16."""
    return plan.optimize.optimizer_offload == "compressed"


def slot_index(place: int, slot: int) -> int:
    """What stands for the weight's index in the key of one moment."""
    return 2**31 + SLOTS * place + slot
