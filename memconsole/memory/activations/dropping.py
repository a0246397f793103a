"""The temporary bytes that dropout needs while it makes a mask. No mask is kept for the backward pass."""

from __future__ import annotations

from memconsole.memory.activations.kernels import CAPPED_QUERIES
from memconsole.memory.state.step_sizes import StepSizes

THERE, BACK, MASK = 4, 12, 1
"""Bytes per attention weight of the queries that are computed at a time: fp32 scores in the forward pass, three times
these in the backward pass, and the mask."""
COPY = 4
"""Bytes per attention weight of a copy after dropout, in the backward pass."""
BITS = 2
"""Random bytes that XLA draws for each number."""


def dropping_bytes(step: StepSizes) -> tuple[int, int]:
    """The most bytes per token in the forward and in the backward pass. They are either those of a copy and a mask at
    the residual stream or at an adapter, or those of attention with dropout, which torch computes for some queries at a
    time. The two never exist at the same time. What attention needs in JAX depends on its chunks: see `jax_step`."""
    t, a, o = step.plan.train, step.architecture, step.plan.optimize
    jax = step.plan.backend == "jax"
    c = 4 if jax and step.kind == "cpu" else step.compute
    widths = [a.hidden_size] if t.dropout else []
    widths += [max(a.hidden_size, a.intermediate_size, a.query_width)] if o.lora_dropout else []
    found = (c + MASK + (BITS if jax else 0)) * max(widths, default=0)
    if jax or not t.attention_dropout:
        return found, found
    shares = a.heads * min(step.sequence, CAPPED_QUERIES)
    narrow = c if c < 4 else 0
    sums = 2 * 4 * a.key_width if narrow else 0
    there, back = shares * (THERE + MASK + narrow), shares * (BACK + COPY + MASK + narrow) + sums
    return max(found, there), max(found, back)
