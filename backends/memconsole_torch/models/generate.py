"""Samples text from a decoder with a key-value cache. The random numbers depend only on the seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memconsole_torch.models.decoder import (
    Decoder,
    Rotation,
    rotation,
    sliding_window_mask,
)
from memconsole_torch.models.linear import compute_dtype
from memconsole_torch.shards import gathered
from memconsole_trainer.engine import OnTokens, Sampling

ROW_TOKENS = 64
"""A prompt is padded at its end to a multiple of this, because oneDNN caches a kernel for each shape
of a 16-bit product. Attention is causal, so the padding does not change the result."""


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompt: list[int],
    tokens: int,
    sampling: Sampling,
    on_tokens: OnTokens | None = None,
) -> list[int]:
    """See `Engine.generate`. With learned positions, only the end of `prompt` that fits is used. Raises ValueError for
    an empty prompt, and with learned positions unless fewer tokens are wanted than there are positions."""
    a = decoder.architecture
    if a.positions == "learned":
        if tokens >= a.max_positions:
            raise ValueError(f"{tokens} tokens, but the model has {a.max_positions} positions")
        prompt = prompt[-(a.max_positions - tokens) :]
    if not prompt:
        raise ValueError("a prompt needs at least one token")
    random = np.random.Generator(np.random.Philox(sampling.seed))
    length = len(prompt) + tokens
    cached = Cached(decoder, a.longest_with_same_angles(len(prompt), length))
    found: list[int] = []
    seen = prompt
    for _ in range(tokens):
        # LongRoPE turns all positions of a longer row by other angles.
        if len(prompt) + len(found) > cached.most:
            cached, seen = Cached(decoder, length), prompt + found
        logits = cached.logits(seen).float().cpu().numpy()  # (V,)
        found.append(choose(logits, sampling, random))
        if on_tokens is not None:
            on_tokens(found[-1:])
        if found[-1] in sampling.stop:
            break
        seen = found[-1:]
    return found


class Cached:
    """A decoder with the keys and values of the tokens it has read: of each layer (1, K, S, D)."""

    def __init__(self, decoder: Decoder, most: int) -> None:
        """`most` is how many tokens it can read in all."""
        a = decoder.architecture
        self._decoder, self.most = decoder, most
        self._device = decoder.embedding.weight.device
        self._wide = rotation(a, most, local=False, device=self._device)
        self._near = rotation(a, most, local=True, device=self._device)
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._read = 0

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits (V,) of what follows after `tokens`: the prompt first, then one token at a time."""
        decoder, begin, count = self._decoder, self._read, len(tokens)
        room = count if begin else min(self.most, -(-count // ROW_TOKENS) * ROW_TOKENS)
        row = torch.tensor([tokens + [0] * (room - count)], device=self._device)  # (1, T)
        with gathered(decoder):
            x = decoder.embed(row, start=begin)
            mask = sliding_window_mask(decoder.architecture, room, compute_dtype(x), self._device)
            for index, block in enumerate(decoder.layers):
                local = decoder.architecture.is_local(index)
                with gathered(block):
                    x = self._through(block, index, x, local, mask, count)
            self._read += count
            return decoder.scores(decoder.norm(x)[0, count - 1])

    def _through(
        self, block: Any, index: int, x: Tensor, local: bool, mask: Tensor | None, count: int
    ) -> Tensor:
        """Run one block on x (1, T, H). Keys and values of its first `count` tokens are added to the cache."""
        begin, length = self._read, x.shape[1]
        angles = None
        if self._decoder.architecture.is_rotated(index):
            angles = _part(self._near if local else self._wide, begin, length)
        q, k, v = block.attention.project(block.attention_norm(x), angles)
        if not begin:
            places = (1, k.shape[1], self.most, k.shape[3])
            self._kept.append((k.new_empty(places), v.new_empty(places)))
        keys, values = self._kept[index]
        keys[:, :, begin : begin + count] = k[:, :, :count]
        values[:, :, begin : begin + count] = v[:, :, :count]
        if begin:
            window = self._decoder.architecture.sliding_window
            first = max(0, begin + 1 - window) if local and window is not None else 0
            k, v = keys[:, :, first : begin + 1], values[:, :, first : begin + 1]
            everything = q.new_zeros(1, k.shape[2])  # causal attention would align the first keys
            attended = block.attention.attended(q, k, v, everything)
        else:
            attended = block.attention.attended(q, k, v, mask if local else None)
        return block.feed(x, block.attention.joined(attended))  # type: ignore[no-any-return,unused-ignore]


def _part(angles: Rotation | None, start: int, length: int) -> Rotation | None:
    """The angles of `length` positions from `start` on. Padding beyond the last one has none of its
    own."""
    if angles is None:
        return None
    index = torch.arange(start, start + length).clamp(max=len(angles[0]) - 1)
    return angles[0][index], angles[1][index]


def choose(logits: NDArray[np.float32], sampling: Sampling, random: np.random.Generator) -> int:
    """Draw one token from softmax(logits / temperature), restricted to the `top_k` most likely tokens and
    then to the fewest of these whose probabilities add up to `top_p` (Holtzman et al. 2020, §3.1)."""
    top_k, top_p = sampling.top_k, sampling.top_p
    if sampling.temperature <= 0.0:
        return int(logits.argmax())
    scores = logits.astype(np.float64) / sampling.temperature
    if 0 < top_k < scores.size:
        floor = np.partition(scores, -top_k)[-top_k]
        scores[scores < floor] = -np.inf
    weights = np.exp(scores - scores.max())
    if top_p < 1.0:
        falling = np.sort(weights)[::-1]
        before = np.cumsum(falling) - falling
        weights[weights < falling[before < top_p * falling.sum()].min()] = 0.0
    edges = np.cumsum(weights)
    return int(np.searchsorted(edges, random.random() * edges[-1], side="right"))
