"""Host memory of the trainer's process tree: framework, data, and what was moved off the device."""

from __future__ import annotations

from memconsole.memory.coefficients import Runtime
from memconsole.plan.plan import Plan

TOKEN_BYTES = 4
"""int32, as rows are held."""
PIPELINE_BYTES = 16 * 2**20
"""Tokenizer, prefetched batches and the data pipeline's own code."""


def data_bytes(plan: Plan) -> int:
    """Rows held on the host: the shuffle buffer and one effective batch."""
    rows = plan.data.shuffle_buffer if plan.data.streaming else 0
    if plan.data.max_examples is not None:
        rows = min(rows, plan.data.max_examples)
    per_row = TOKEN_BYTES * (plan.data.sequence_length + 1)
    return rows * per_row + 2 * TOKEN_BYTES * plan.tokens_per_step


def host_bytes(plan: Plan, costs: Runtime, offloaded: int, on_host: int) -> int:
    """Peak resident bytes: `offloaded` optimizer state, and `on_host` tensors where the device is the CPU."""
    return costs.host_bytes + PIPELINE_BYTES + data_bytes(plan) + offloaded + on_host
