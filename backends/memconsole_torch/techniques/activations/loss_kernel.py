"""Cross-entropy and its gradient on a GPU, in one Triton kernel that overwrites the logits.

Each program handles one row. It reads the row once for the maximum and the sum of exponentials, rescaled whenever the
maximum grows (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), and once more to write the
gradient. A row stays in the GPU's cache in between. All arithmetic is in fp32, and the logits keep their type: 16-bit
logits need no copy in fp32.

torch's wheels for Linux bring Triton. Where it is missing, `fused_loss` uses torch's own operations.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memconsole.plan.tasks.language import MASKED

BLOCK, OF_A_WARP = 8192, 512
"""Columns that a program reads at a time, and those of a warp of them."""


def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs on `device`."""
    return device.type == "cuda" and _installed()


def lines(device: torch.device) -> list[str]:
    """What the log says of the kernel: nothing where it is not missing."""
    missing = device.type == "cuda" and not _installed()
    return ["Triton is not installed: the loss takes more memory and time than estimated"] * missing


def into_slopes(
    scores: Tensor,
    targets: Tensor,
    share: Tensor | float,
    vocabulary: int,
    cap: float | None,
    wanted: bool,
) -> Tensor:
    """Summed nats, as an fp32 scalar, of logits (N, V or more) and int64 targets (N,), of which -100 is masked.

    Overwrites the logits, if `wanted`, with the gradient of `share` times the nats. Columns from `vocabulary` on are
    padding: their gradient is 0. With a `cap`, the logits x are cap · tanh(x / cap).
    """
    nats = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    factor = share if isinstance(share, Tensor) else torch.full((), share, device=scores.device)
    _launch(scores, targets, nats, factor.float(), vocabulary, cap, wanted)
    return nats.sum()


def _launch(
    scores: Tensor,
    targets: Tensor,
    nats: Tensor,
    factor: Tensor,
    vocabulary: int,
    cap: float | None,
    wanted: bool,
) -> None:
    rows, columns = scores.shape
    block = min(BLOCK, 1 << (columns - 1).bit_length())
    _kernel()[(rows,)](
        scores, targets, nats, factor, scores.stride(0), vocabulary, columns, cap or 0.0,
        capped=cap is not None, wanted=wanted, masked=MASKED, block=block, num_warps=max(1, block // OF_A_WARP),
    )  # fmt: skip


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _kernel() -> Any:
    """The kernel. Triton is imported with it, because the import takes as long as it takes torch's compiler."""
    from memconsole_torch.techniques.activations import loss_program

    return loss_program.slopes
