"""The head and the cross-entropy: what the logits cost in each pass, whole or in chunks of tokens."""

from __future__ import annotations

import msgspec

from memconsole.plan.architecture import Architecture

CHUNK_TOKENS = 1024
"""Tokens a chunked cross-entropy takes at a time."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of logits and what is computed from them."""

    forward: int
    """After the loss is computed."""
    backward: int
    """While the gradient of the logits is made."""
    head: int
    """While the head's matmul runs backward."""
    evaluation: int
    early_gradient: int
    """Gradient of the head that a chunked loss makes in the forward pass."""


def loss(backend: str, precision: str, fused: bool, a: Architecture, tokens: int) -> Loss:
    """The loss over `tokens` tokens of vocabulary `a.vocab_size`."""
    compute = 4 if precision == "fp32" else 2
    head = 4 * a.vocab_size * a.hidden_size
    if fused:
        chunk = min(tokens, CHUNK_TOKENS) * a.vocab_size
        stream = 4 * tokens * a.hidden_size
        return Loss(
            forward=12 * chunk + stream + head,
            backward=stream + head,
            head=stream,
            evaluation=8 * chunk,
            early_gradient=head,
        )
    n = tokens * a.vocab_size
    copy = 0 if compute == 4 else 2 * n
    return Loss(
        forward=8 * n + copy,
        backward=12 * n + copy,
        head=4 * n + copy,
        evaluation=8 * n + copy,
        early_gradient=0,
    )
