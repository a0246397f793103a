"""The temporary bytes that dropout needs while it makes a mask. No mask is kept for the backward pass."""

from __future__ import annotations

from memconsole.memory.state.step_sizes import StepSizes

MASK = 1
"""Bytes of the mask for each number."""
BITS = 2
"""Random bytes that XLA draws for each number."""


def dropping_bytes(step: StepSizes) -> int:
    """The most bytes per token of a copy and a mask at the residual stream or at an adapter. What attention needs to drop
    its weights is in the block programs of torch, and depends on chunks in JAX: see `jax_step`."""
    t, a, o = step.plan.train, step.architecture, step.plan.optimize
    jax = step.plan.backend == "jax"
    c = 4 if jax and step.kind == "cpu" else step.compute
    widths = [a.hidden_size] if t.dropout else []
    widths += [max(a.hidden_size, a.intermediate_size, a.query_width)] if o.lora_dropout else []
    return (c + MASK + (BITS if jax else 0)) * max(widths, default=0)
