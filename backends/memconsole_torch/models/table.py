"""A lookup table whose values are loaded after it is made."""

from __future__ import annotations

import torch
from torch import nn


def table(rows: int, width: int) -> nn.Embedding:
    """A table (rows, width) that is trained.

    `nn.Embedding(rows, width)` would draw values. On the meta device that imports torch's compiler,
    which takes a second or two.
    """
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
