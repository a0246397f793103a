"""Computes logits and gradients of a decoder on the CPU, for comparing backends."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memconsole.plan.architecture import Architecture
from memconsole_torch.models import pretrained
from memconsole_torch.models.decoder import Decoder
from memconsole_torch.techniques import fused_loss
from memconsole_trainer.engine import Batch, WeightSource


def _decoder(architecture: Architecture, weights: WeightSource) -> Decoder:
    make = partial(Decoder, architecture)
    return pretrained.load(architecture, make, weights, torch.device("cpu"))


def logits(
    architecture: Architecture,
    weights: WeightSource,
    tokens: NDArray[np.int32],
    documents: NDArray[np.int32] | None = None,
) -> NDArray[np.float32]:
    """fp32 logits (B, T, V) of `tokens` (B, T) on the CPU."""
    decoder = _decoder(architecture, weights)
    own = None if documents is None else torch.from_numpy(documents)
    with torch.no_grad():
        result: Any = decoder.logits(torch.from_numpy(tokens), own).numpy()
    return np.asarray(result, dtype=np.float32)


def gradients(
    architecture: Architecture, weights: WeightSource, batch: Batch
) -> dict[str, NDArray[np.float32]]:
    """fp32 gradients of the mean nats per unmasked target on the CPU, by canonical name.

    Parameters that the loss does not depend on are left out.
    """
    decoder = _decoder(architecture, weights)
    for arrays in batch.micro_batches():
        rows = {name: torch.from_numpy(array) for name, array in arrays.items()}
        hidden = decoder(rows["inputs"], rows.get("documents"))
        nats = fused_loss.whole(hidden, decoder.head_weight, rows["targets"])
        (nats / batch.weight).backward()
    own = dict(decoder.named_parameters())
    used = (p for p in architecture.parameters() if p.used)
    return {p.name: own[p.name].grad.numpy() for p in used}
