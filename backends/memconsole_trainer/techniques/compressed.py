"""Optimizer state kept in bfloat16 between steps (`optimize.optimizer_offload = compressed`): the
specification.

- A step widens the moments of a slice of a weight to fp32, updates moments and weight as usual, and
  stores the new moments in bf16. The weight is updated with the moments before they are rounded.
- Rounding is stochastic, as `rounding` specifies. With rounding to nearest, a second moment could
  not change: a step changes it by a share of 1 - beta2, which is 0.001 at 0.999, and a relative
  change below 2^-9 would be lost. Stochastic rounding is right on average. One rounding has a
  relative error of at most 2^-8 (standard deviation), and about the last 1 / (1 - beta2²) roundings
  contribute. So the error of a stationary second moment is at most 2^-8 / sqrt(1 - beta2²): 1.3 %
  at 0.95, 8.7 % at 0.999. The update divides by the root and has half that error.
- Random bits come from the key threefry((seed's lower, upper 32 bits), (previous updates, 2^31 + 2
  i + slot)) for the weight at index i of `adapters.trained_parameters`. Slot 0 is the first or only
  moment, slot 1 the second. The 2^31 keeps these keys apart from those that round weights. A
  skipped update is not counted and changes no state.
"""

from __future__ import annotations

from memconsole.plan.plan import Plan

SLOTS = 2


def is_compressed(plan: Plan) -> bool:
    """Whether moments are kept in bf16."""
    return plan.optimize.optimizer_offload == "compressed"


def slot_index(place: int, slot: int) -> int:
    """The number that takes the place of the weight's index in the key of one moment."""
    return 2**31 + SLOTS * place + slot
