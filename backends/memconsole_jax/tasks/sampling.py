"""Samples with a key-value cache: reads the prompt in blocks, then draws one token at a time. Shapes are fixed: one
compilation per cache length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from memconsole.plan.models.architecture import Architecture
from memconsole_jax.layout.mesh import put
from memconsole_jax.models.decoder import Decoder, differing, layer_view
from memconsole_jax.models.rotary import all_rotations
from memconsole_jax.tasks.task import Tree
from memconsole_jax.techniques.weights.lora import assembled
from memconsole_trainer.data.text.rows.validation import PROMPT_TOKENS
from memconsole_trainer.engine import OnTokens, Sampling

STOPS = 8
"""Tokens that end a sample are filled up to a multiple of this, so that few programs are compiled."""
READ_TOKENS = 128
"""A prompt is read in blocks of so many tokens. Attention is causal, so what fills up the last block changes nothing."""
STREAMED_TOKENS = 4
"""Tokens that one call of a program draws if they are streamed."""
Cache = tuple[Array, Array]
"""Keys and values of every position so far, each (L, S, K, D)."""


class TokenSampler:
    """Implements `memconsole_jax.tasks.task.Sampler` for a decoder."""

    def __init__(
        self, architecture: Architecture, weights: Any, place: Any, adapter_scale: float = 2.0
    ) -> None:
        self._scale = adapter_scale
        self._architecture, self._weights, self._place = architecture, weights, place
        self._programs: dict[tuple[int, int], Any] = {}
        """Compiled programs by cache length and number of stops."""

    def prepare(self, tokens: int) -> Callable[[], None]:
        """Trace the program for samples of `tokens` tokens in a training run. Returns what compiles it."""
        room = self._architecture.max_positions
        if not tokens or room <= PROMPT_TOKENS + 1:
            return lambda: None
        positions = cache_length(PROMPT_TOKENS, min(tokens, room - PROMPT_TOKENS - 1))
        lowered = self._lowered(positions, STOPS)

        def compiled() -> None:
            self._programs[positions, STOPS] = lowered.compile()

        return compiled

    def __call__(
        self,
        weights: Tree,
        prompt: list[int],
        tokens: int,
        sampling: Sampling,
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        """See `Engine.generate`. With learned positions, only the end of `prompt` that fits is used. An empty prompt
        stands for token 0. Raises ValueError unless fewer tokens are wanted than there are learned positions."""
        a, stop = self._architecture, sampling.stop
        if a.positions == "learned":
            if tokens >= a.max_positions:
                raise ValueError(f"{tokens} tokens, but the model has {a.max_positions} positions")
            prompt = prompt[-(a.max_positions - tokens) :]
        prompt = prompt or [0]
        length = len(prompt) + tokens
        row = np.zeros(cache_length(len(prompt), tokens), np.int32)
        row[: len(prompt)] = prompt
        stops = np.full(max(1, -(-len(stop) // STOPS)) * STOPS, -1, np.int32)
        stops[: len(stop)] = list(stop)
        program = self._program(len(row), len(stops))
        known, read, alike = len(prompt), 0, a.longest_with_same_angles(len(prompt), length)
        at_once = length if on_tokens is None else STREAMED_TOKENS
        shape = (a.layers, len(row), a.kv_heads, a.head_size)
        cache = tuple(jnp.zeros(shape, device=self._place) for _ in range(2))
        while known < length:
            if known > alike:  # LongRoPE turns all positions of a longer row by other angles
                read, alike = 0, length
            arguments = (
                row,
                np.int32(read),
                np.int32(known),
                np.int32(min(length, alike + 1, known + at_once)),
                np.float32(sampling.temperature),
                np.int32(sampling.top_k),
                np.uint32(sampling.seed % 2**32),
                stops,
                np.float32(sampling.top_p),
            )
            placed = (put(value, self._place) for value in arguments)
            filled, cache, filled_to = program(weights, cache, *placed)
            row, before, known = np.asarray(filled), known, int(filled_to)
            read = known - 1
            if on_tokens is not None:
                on_tokens(row[before:known].tolist())
            if row[known - 1] in stop:
                break
        found: list[int] = row[len(prompt) : known].tolist()
        return found

    def _program(self, positions: int, stops: int) -> Any:
        sizes = positions, stops
        if sizes not in self._programs:
            self._programs[sizes] = self._lowered(*sizes).compile()
        return self._programs[sizes]

    def _lowered(self, positions: int, stops: int) -> Any:
        row, count = self._shape(jnp.int32, positions), self._shape(jnp.int32)
        number = self._shape(jnp.float32)
        ends = self._shape(jnp.int32, stops)
        a = self._architecture
        cached = self._shape(jnp.float32, a.layers, positions, a.kv_heads, a.head_size)
        more = count, count, count, number, count, self._shape(jnp.uint32), ends, number
        step = jax.jit(
            partial(sample, adapter_scale=self._scale),
            static_argnums=0,
            donate_argnames="cache",
            out_shardings=self._place,
        )
        return step.lower(a, self._weights, (cached, cached), row, *more)

    def _shape(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)


def cache_length(prompt: int, tokens: int) -> int:
    """Length of the cache: the next power of two, so that similar lengths share a program."""
    return max(32, 1 << (prompt + tokens - 1).bit_length())


def sample(
    a: Architecture,
    weights: dict[str, Array],
    cache: Cache,
    tokens: Array,
    read: Array,
    known: Array,
    until: Array,
    temperature: Array,
    top_k: Array,
    seed: Array,
    stop: Array,
    top_p: Array | float = 1.0,
    adapter_scale: float = 2.0,
) -> tuple[Array, Cache, Array]:
    """Draw positions `known` .. `until` of `tokens` (S,), up to a token in `stop`. The first `read` tokens are in the
    `cache`. Also returns the cache, and how many tokens are known. Jit with `a` static. Positions turn by the angles
    of a row of `known` tokens.

    `temperature` 0 takes the most likely token; `top_k` 0 and `top_p` 1 mean all tokens. The token at a position
    depends only on the seed, the position and the tokens before it.
    """
    decoder = assembled(a, weights, adapter_scale)
    block = min(READ_TOKENS, tokens.shape[0])
    key = jax.random.key(seed)

    def reading(carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        position, cache = carry
        part = lax.dynamic_slice(tokens, (position,), (block,))
        return position + block, _read(decoder, part, position, known, cache)[1]

    def going_on(carry: tuple[Array, Array, Cache]) -> Array:
        position, tokens, _ = carry
        stopped = (position >= known) & jnp.any(tokens[position] == stop)
        return (position < until - 1) & ~stopped

    def drawing(carry: tuple[Array, Array, Cache]) -> tuple[Array, Array, Cache]:
        position, tokens, cache = carry
        x, cache = _read(decoder, tokens[position][None], position, known, cache)
        logits = decoder.logits(decoder.norm(x))[0, 0]
        drawn = _draw(logits, temperature, top_k, top_p, jax.random.fold_in(key, position))
        return position + 1, tokens.at[position + 1].set(drawn), cache

    # All known tokens but the last one: what follows that one is drawn.
    _, cache = lax.while_loop(lambda carry: carry[0] < known - 1, reading, (read, cache))
    last, tokens, cache = lax.while_loop(going_on, drawing, (known - 1, tokens, cache))
    return tokens, cache, last + 1


def _read(
    decoder: Decoder, tokens: Array, begin: Array, length: Array, cache: Cache
) -> tuple[Array, Cache]:
    """Output of the last block (1, T, C) for `tokens` (T,) at the positions from `begin` on, and the cache including
    them. Positions turn by the angles of a row of `length` tokens."""
    a = decoder.architecture
    count, size = tokens.shape[0], cache[0].shape[1]
    at = begin + jnp.arange(count)
    x = decoder.embed(tokens[None], at)  # (1, T, C)
    rotations = all_rotations(a, at, length)
    graph, stacked = nnx.split(decoder.layers)

    def layer(carry: tuple[Array, Cache], inputs: Any) -> tuple[tuple[Array, Cache], None]:
        x, (keys, values) = carry
        index, weights, differs = inputs
        block = nnx.merge(graph, weights)
        rotation, window = layer_view(a, rotations, differs, size)
        q, k, v = block.attention.project(block.attention_norm(x), rotation)
        keys = lax.dynamic_update_slice(keys, k, (index, begin, 0, 0))  # (L, S, K, D)
        values = lax.dynamic_update_slice(values, v, (index, begin, 0, 0))
        q = q.reshape(count, a.kv_heads, -1, a.head_size)  # (T, K, G, D)
        scores = jnp.einsum("tkgd,skd->kgts", q, keys[index]) * a.scale
        if a.attention_cap is not None:
            scores = a.attention_cap * jnp.tanh(scores / a.attention_cap)
        column = jnp.arange(size)
        seen = column <= at[:, None]  # (T, S)
        if window is not None:
            seen &= at[:, None] - column < window
        share = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        y = jnp.einsum("kgts,skd->tkgd", share, values[index]).reshape(1, count, -1)
        return (block.feed(x, block.attention.output(y)), (keys, values)), None

    inputs = jnp.arange(a.layers), stacked, differing(a)
    (x, cache), _ = lax.scan(layer, (x, cache), inputs)
    return x, cache


def _draw(
    logits: Array, temperature: Array, top_k: Array, top_p: Array | float, key: Array
) -> Array:
    """Draw one token from the `top_k` most likely ones, restricted to the fewest of these whose probabilities
    add up to `top_p`."""
    vocab = logits.shape[0]
    kept = jnp.where(top_k <= 0, vocab, jnp.minimum(top_k, vocab))
    falling = jnp.sort(logits)[::-1]
    falling = jnp.where(jnp.arange(vocab) < kept, falling, -jnp.inf)
    scale = jnp.maximum(temperature, 1e-6)
    shares = jax.nn.softmax(falling / scale)
    inside = (jnp.cumsum(shares) - shares < top_p) & (falling > -jnp.inf)
    threshold = jnp.min(jnp.where(inside, falling, jnp.inf))
    drawn = jax.random.categorical(key, jnp.where(logits >= threshold, logits, -jnp.inf) / scale)
    return jnp.where(temperature <= 0, jnp.argmax(logits), drawn).astype(jnp.int32)
