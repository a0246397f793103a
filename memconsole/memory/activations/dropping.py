"""What dropout holds beside a step's activations while it makes a mask; it keeps none of them."""

from __future__ import annotations

from memconsole.memory.activations.kernels import CAPPED_QUERIES
from memconsole.memory.state.step_sizes import StepSizes

THERE, BACK, MASK = 4, 12, 1
"""Bytes per share of a part's queries: its scores in the forward pass, three times these in the backward pass; its mask."""
COPY = 4
"""A copy of the shares with dropped ones, in the backward pass."""
BITS = 2
"""Random bytes that XLA draws for each number."""


def dropping_bytes(step: StepSizes) -> tuple[int, int]:
    """The most bytes per token in the forward and in the backward pass: of a copy and a mask at the residual stream or
    at an adapter, or of attention whose shares are dropped, which torch computes for some queries at a time. They are
    never there together."""
    t, a, o = step.plan.train, step.architecture, step.plan.optimize
    jax = step.plan.backend == "jax"
    c = 4 if jax and step.kind == "cpu" else step.compute
    widths = [a.hidden_size] if t.dropout else []
    widths += [max(a.hidden_size, a.intermediate_size, a.query_width)] if o.lora_dropout else []
    found = (c + MASK + (BITS if jax else 0)) * max(widths, default=0)
    if not t.attention_dropout:
        return found, found
    shares = a.heads * min(step.sequence, CAPPED_QUERIES)
    if jax:  # its scores are priced already
        return found + shares * (MASK + BITS), found + shares * (MASK + BITS)
    narrow = c if c < 4 else 0
    sums = 2 * 4 * a.key_width if narrow else 0
    there, back = shares * (THERE + MASK + narrow), shares * (BACK + COPY + MASK + narrow) + sums
    return max(found, there), max(found, back)
