"""Host memory of the trainer's process tree: framework, data, and what was moved off the device."""

from __future__ import annotations

from memconsole.memory.coefficients import Runtime
from memconsole.memory.data import data_bytes
from memconsole.plan.plan import Plan


def host_bytes(plan: Plan, vocab_size: int, costs: Runtime, offloaded: int, on_host: int) -> int:
    """Peak resident bytes: the idle trainer, its data, `offloaded` optimizer state, and `on_host` tensors
    where the device is the CPU."""
    return costs.host_bytes + data_bytes(plan, vocab_size) + offloaded + on_host
