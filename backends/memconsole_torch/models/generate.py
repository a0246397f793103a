"""Samples text from a decoder token by token. The random numbers depend only on the seed."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from memconsole_torch.models.decoder import Decoder

ROW_TOKENS = 64
"""Rows are padded at the end to a multiple of this, because oneDNN caches a kernel for each shape
of a 16-bit product. Attention is causal, so the padding does not change the result."""


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompt: list[int],
    tokens: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
    context: int,
    stop: int | None = None,
) -> list[int]:
    """Sample `tokens` tokens that continue `prompt`, each predicted from the last `context` tokens.
    Ends early after a `stop` token.

    Temperature 0 takes the most likely token; `top_k` 0 draws from all. Raises ValueError for an
    empty prompt.
    """
    if not prompt:
        raise ValueError("a prompt needs at least one token")
    random = np.random.Generator(np.random.Philox(seed))
    device = decoder.embedding.weight.device
    sequence = list(prompt)
    for _ in range(tokens):
        seen = sequence[-context:]
        length = min(context, -(-len(seen) // ROW_TOKENS) * ROW_TOKENS)
        row = torch.tensor([seen + [0] * (length - len(seen))], device=device)  # (1, T)
        hidden = decoder(row)[0, len(seen) - 1]  # (H,)
        logits = F.linear(hidden, decoder.head_weight).float().cpu().numpy()  # (V,)
        sequence.append(choose(logits, temperature, top_k, random))
        if sequence[-1] == stop:
            break
    return sequence[len(prompt) :]


def choose(
    logits: NDArray[np.float32], temperature: float, top_k: int, random: np.random.Generator
) -> int:
    """Draw one token from softmax(logits / temperature) over the `top_k` most likely ones."""
    if temperature <= 0.0:
        return int(logits.argmax())
    scores = logits.astype(np.float64) / temperature
    if 0 < top_k < scores.size:
        floor = np.partition(scores, -top_k)[-top_k]
        scores[scores < floor] = -np.inf
    weights = np.exp(scores - scores.max())
    edges = np.cumsum(weights)
    return int(np.searchsorted(edges, random.random() * edges[-1], side="right"))
