"""Samples text from a decoder with a key-value cache. The random numbers depend only on the seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memconsole_torch.models.decoder import Decoder, sliding_window_mask
from memconsole_torch.models.linear import compute_dtype
from memconsole_torch.models.rotary import Rotation, rotation_of
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
    cached = CachedDecoder(decoder, a.longest_with_same_angles(len(prompt), length))
    generated: list[int] = []
    unread = prompt
    for _ in range(tokens):
        # LongRoPE rotates all positions of a longer row by other angles, so its keys are computed again.
        if len(prompt) + len(generated) > cached.capacity:
            cached, unread = CachedDecoder(decoder, length), prompt + generated
        logits = cached.logits(unread).float().cpu().numpy()  # (V,)
        generated.append(choose(logits, sampling, random))
        if on_tokens is not None:
            on_tokens(generated[-1:])
        if generated[-1] in sampling.stop:
            break
        unread = generated[-1:]
    return generated


class CachedDecoder:
    """A decoder, and the keys and values (1, K, S, D) of each layer for the tokens that it has read."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        """`capacity` is how many tokens it can read in all (S)."""
        a = decoder.architecture
        self._decoder, self.capacity = decoder, capacity
        self._device = decoder.embedding.weight.device
        self._global_rotation = rotation_of(a, capacity, local=False, device=self._device)
        self._local_rotation = rotation_of(a, capacity, local=True, device=self._device)
        self._cache: list[tuple[Tensor, Tensor]] = []
        self._read = 0

    def logits(self, tokens: list[int]) -> Tensor:
        """Read `tokens`, and return the logits (V,) of the token after them. The first call reads the prompt, every later
        call one token."""
        decoder, begin, count = self._decoder, self._read, len(tokens)
        length = count if begin else min(self.capacity, -(-count // ROW_TOKENS) * ROW_TOKENS)
        row = torch.tensor([tokens + [0] * (length - count)], device=self._device)  # (1, T)
        with gathered(decoder):
            x = decoder.embed(row, start=begin)
            mask = sliding_window_mask(decoder.architecture, length, compute_dtype(x), self._device)
            for index, block in enumerate(decoder.layers):
                local = decoder.architecture.is_local(index)
                with gathered(block):
                    x = self._run_block(block, index, x, local, mask, count)
            self._read += count
            return decoder.scores(decoder.norm(x)[0, count - 1])

    def _run_block(
        self, block: Any, index: int, x: Tensor, local: bool, mask: Tensor | None, count: int
    ) -> Tensor:
        """Run one block on x (1, T, H). Keys and values of its first `count` tokens are added to the cache."""
        begin, length = self._read, x.shape[1]
        rotation = None
        if self._decoder.architecture.is_rotated(index):
            row_rotation = self._local_rotation if local else self._global_rotation
            rotation = _part(row_rotation, begin, length)
        q, k, v = block.attention.project(block.attention_norm(x), rotation)
        if not begin:
            shape = (1, k.shape[1], self.capacity, k.shape[3])
            self._cache.append((k.new_empty(shape), v.new_empty(shape)))
        keys, values = self._cache[index]
        keys[:, :, begin : begin + count] = k[:, :, :count]
        values[:, :, begin : begin + count] = v[:, :, :count]
        if begin:
            window = self._decoder.architecture.sliding_window
            first = max(0, begin + 1 - window) if local and window is not None else 0
            k, v = keys[:, :, first : begin + 1], values[:, :, first : begin + 1]
            # Without a mask, the one query would count as the row's first, which sees only the first key.
            all_visible = q.new_zeros(1, k.shape[2])
            heads = block.attention.attend(q, k, v, all_visible)
        else:
            heads = block.attention.attend(q, k, v, mask if local else None)
        return block.after_attention(x, block.attention.project_output(heads))  # type: ignore[no-any-return,unused-ignore]


def _part(rotation: Rotation | None, start: int, length: int) -> Rotation | None:
    """The rotation of `length` positions from `start` on. Padding after the last position is rotated like it."""
    if rotation is None:
        return None
    index = torch.arange(start, start + length).clamp(max=len(rotation[0]) - 1)
    return tuple(table[index] for table in rotation)


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
        descending = np.sort(weights)[::-1]
        more_likely = np.cumsum(descending) - descending  # summed weight of the more likely tokens
        weights[weights < descending[more_likely < top_p * descending.sum()].min()] = 0.0
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, random.random() * cumulative[-1], side="right"))
