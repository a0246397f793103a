"""Muon (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982): the specification of both backends.

The matrices inside the blocks, or their adapters, are updated by an orthogonalized momentum. All
other weights (embeddings, positions, head, norms, biases) use AdamW. Each expert's matrices count
as matrices of their own, and so does a router, as in Moonlight (Liu et al., §3.4 lists the weights)
and in MaxText (`muon_utils.transform_logic`). For a matrix with gradient g and momentum m, both
fp32:

    m = m + (1 - MOMENTUM) (g - m)
    x = g + MOMENTUM (m - g)                         Nesterov's look-ahead
    x = x / max(|x|, EPSILON), transposed if it has more rows than columns
    x = a x + (b x xᵀ + c (x xᵀ)²) x                 STEPS times, COEFFICIENTS a, b, c
    update = 0.2 sqrt(max(rows, columns)) x

The last factor gives the update the typical root mean square of AdamW's (Liu et al., eq. 4), so
that one learning rate suits both. torch.optim.Muon with `match_rms_adamw` does the same in
bfloat16; optax's corrects the bias of m.
"""

from __future__ import annotations

from memconsole.plan.models.model import ORTHOGONALIZED, Parameter

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPSILON = 1e-7


def is_orthogonalized(parameter: Parameter) -> bool:
    """Whether Muon updates this weight: matrices of the blocks and adapters."""
    return parameter.role in ORTHOGONALIZED


def scale(shape: tuple[int, ...]) -> float:
    """The factor of an orthogonalized matrix (..., rows, columns)."""
    return 0.2 * float(max(shape[-2:])) ** 0.5
