"""Cross-entropy and its gradient on a GPU, in one kernel that overwrites the logits.

Each instance of the kernel handles one row. It reads the row once for the maximum and the sum of exponentials, which is
rescaled whenever the maximum grows (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), and once more
to write the gradient. A row stays in the GPU's cache in between. All arithmetic is in fp32, and the logits keep their type: 16-bit
logits need no copy in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memconsole.plan.tasks.language import MASKED
from memconsole_torch.kernels import launch

BLOCK, WARP_COLUMNS = 8192, 512
"""Columns that an instance reads at a time, and how many of them each warp reads."""


def in_place_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    share: Tensor | float,
    vocabulary: int,
    cap: float | None,
    with_gradient: bool,
    nats_of_targets: Tensor | None = None,
) -> Tensor:
    """Summed nats, as an fp32 scalar, of `logits` (N, V or more) and int64 `targets` (N,), of which `MASKED` ones do not
    count. The nats of each target are written to `nats_of_targets` (N,), if it is given.

    If `with_gradient`, the logits are overwritten with the gradient of `share` times the nats; each target may have a share
    of its own, (N, 1). Columns from `vocabulary` on are padding: their gradient is 0. With a `cap`, the logits x become
    cap · tanh(x / cap).
    """
    rows, columns = logits.shape
    nats = nats_of_targets
    if nats is None:
        nats = torch.empty(rows, dtype=torch.float32, device=logits.device)
    factor = share if isinstance(share, Tensor) else torch.full((), share, device=logits.device)
    block = min(BLOCK, 1 << (columns - 1).bit_length())
    launch.run(
        "cross_entropy", rows,
        logits, targets, nats, factor.float(), logits.stride(0), vocabulary, columns, cap or 0.0,
        capped=cap is not None, with_gradient=with_gradient, one_factor=factor.ndim == 0, masked=MASKED, block=block, num_warps=max(1, block // WARP_COLUMNS),
    )  # fmt: skip
    return nats.sum()
