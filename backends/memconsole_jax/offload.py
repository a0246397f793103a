"""Optimizer state in pinned host memory: a step moves it to the device before the update, and back behind it.

XLA plans the copies, and when each runs. Where the device is the host's processor nothing moves.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from memconsole.plan.plan import Plan

PINNED = "pinned_host"


def same_memory(kind: str) -> bool:
    """Whether a `kind` of device keeps its arrays in the host's memory."""
    return kind == "cpu"


def waits_on_host(plan: Plan, kind: str) -> bool:
    """Whether the optimizer's state is in host memory between steps."""
    return plan.optimize.optimizer_offload != "none" and not same_memory(kind)


def on_host(device: Any) -> SingleDeviceSharding:
    """Where `device` finds what waits in host memory."""
    return SingleDeviceSharding(device, memory_kind=PINNED)


def moved(state: Any, place: Any) -> Any:
    """The state's arrays at `place`, within a program; its counts stay on the device."""
    return jax.tree.map(lambda x: jax.device_put(x, place) if x.ndim else x, state)
