"""Samples text from a decoder with a key-value cache.

The prompt is read in blocks, then one token is drawn at a time. Shapes are fixed, so there is one
compilation per cache length.

Letters in shapes: L layers, S positions of the cache, T tokens read at once, C hidden size, K key-value heads, G query heads
of each, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from memconsole.plan.models.architecture import Architecture
from memconsole_jax.layout.mesh import put
from memconsole_jax.models.decoder import Decoder, layer_flags, rotation_and_window
from memconsole_jax.models.rotary import all_rotations
from memconsole_jax.tasks.task import Tree
from memconsole_jax.techniques.weights.lora import assembled
from memconsole_trainer.data.text.rows.validation import PROMPT_TOKENS
from memconsole_trainer.engine import OnTokens, Sampling

STOP_TOKENS = 8
"""The tokens that end a sample are padded to a multiple of this, so that few programs are compiled."""
PREFILL_TOKENS = 128
"""A prompt is read in blocks of so many tokens. Attention is causal, so the padding of the last block changes nothing."""
STREAMED_TOKENS = 4
"""Tokens that one call of a program draws if they are streamed."""
Cache = tuple[Array, Array]
"""Keys and values of the positions that were read, each (L, S, K, D)."""


class Choice(NamedTuple):
    """How a token is chosen: `Sampling` as arrays."""

    temperature: Array
    """0 takes the most likely token."""
    top_k: Array
    """0 means all tokens."""
    top_p: Array
    """1 means all tokens."""
    seed: Array
    stop: Array
    """The tokens that end a sample, padded with -1."""


class TokenSampler:
    """Implements `memconsole_jax.tasks.task.Sampler` for a decoder."""

    def __init__(
        self, architecture: Architecture, weights: Any, place: Any, adapter_scale: float = 2.0
    ) -> None:
        self._scale = adapter_scale
        self._architecture, self._weights, self._place = architecture, weights, place
        self._programs: dict[tuple[int, int], Any] = {}
        """Compiled programs by cache length and number of stop tokens."""

    def prepare(self, tokens: int) -> Callable[[], None]:
        """Trace the program for samples of `tokens` tokens in a training run. Returns what compiles it."""
        room = self._architecture.max_positions
        if not tokens or room <= PROMPT_TOKENS + 1:
            return lambda: None
        positions = cache_length(PROMPT_TOKENS, min(tokens, room - PROMPT_TOKENS - 1))
        lowered = self._lowered(positions, STOP_TOKENS)

        def compile_it() -> None:
            self._programs[positions, STOP_TOKENS] = lowered.compile()

        return compile_it

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
        a = self._architecture
        prompt = self._fitting(prompt, tokens) or [0]
        length = len(prompt) + tokens
        row = np.zeros(cache_length(len(prompt), tokens), np.int32)
        row[: len(prompt)] = prompt
        choice = _choice(sampling)
        program = self._program(len(row), len(choice.stop))
        per_call = length if on_tokens is None else STREAMED_TOKENS
        shape = (a.layers, len(row), a.kv_heads, a.head_size)
        cache = tuple(jnp.zeros(shape, device=self._place) for _ in range(2))
        known, read = len(prompt), 0
        same_angles = a.longest_with_same_angles(len(prompt), length)
        while known < length:
            if (
                known > same_angles
            ):  # LongRoPE rotates all positions of a longer row by other angles
                read, same_angles = 0, length
            until = min(length, same_angles + 1, known + per_call)
            arguments = row, np.int32(read), np.int32(known), np.int32(until), choice
            placed = jax.tree.map(lambda value: put(value, self._place), arguments)
            filled, cache, now_known = program(weights, cache, *placed)
            row, before, known = np.asarray(filled), known, int(now_known)
            read = known - 1
            if on_tokens is not None:
                on_tokens(row[before:known].tolist())
            if row[known - 1] in sampling.stop:
                break
        drawn: list[int] = row[len(prompt) : known].tolist()
        return drawn

    def _fitting(self, prompt: list[int], tokens: int) -> list[int]:
        """The end of `prompt` for which there are positions."""
        a = self._architecture
        if a.positions != "learned":
            return prompt
        if tokens >= a.max_positions:
            raise ValueError(f"{tokens} tokens, but the model has {a.max_positions} positions")
        return prompt[-(a.max_positions - tokens) :]

    def _program(self, positions: int, stops: int) -> Any:
        sizes = positions, stops
        if sizes not in self._programs:
            self._programs[sizes] = self._lowered(*sizes).compile()
        return self._programs[sizes]

    def _lowered(self, positions: int, stops: int) -> Any:
        """`sample`, lowered for a cache of so many positions and so many stop tokens."""
        a = self._architecture
        row, number = self._shape(jnp.int32, positions), self._shape(jnp.int32)
        fraction = self._shape(jnp.float32)
        seed, stop = self._shape(jnp.uint32), self._shape(jnp.int32, stops)
        choice = Choice(fraction, number, fraction, seed, stop)
        cached = self._shape(jnp.float32, a.layers, positions, a.kv_heads, a.head_size)
        program = jax.jit(
            partial(sample, adapter_scale=self._scale),
            static_argnums=0,
            donate_argnames="cache",
            out_shardings=self._place,
        )
        return program.lower(
            a, self._weights, (cached, cached), row, number, number, number, choice
        )

    def _shape(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)


def cache_length(prompt: int, tokens: int) -> int:
    """Length of the cache: the next power of two, so that similar lengths share a program."""
    return max(32, 1 << (prompt + tokens - 1).bit_length())


def _choice(sampling: Sampling) -> Any:
    """`sampling` as a `Choice` of NumPy values."""
    stop = list(sampling.stop)
    padded = np.full(max(1, -(-len(stop) // STOP_TOKENS)) * STOP_TOKENS, -1, np.int32)
    padded[: len(stop)] = stop
    values: list[Any] = [
        np.float32(sampling.temperature),
        np.int32(sampling.top_k),
        np.float32(sampling.top_p),
        np.uint32(sampling.seed % 2**32),
        padded,
    ]
    return Choice(*values)


def sample(
    a: Architecture,
    weights: dict[str, Array],
    cache: Cache,
    tokens: Array,
    read: Array,
    known: Array,
    until: Array,
    choice: Choice,
    adapter_scale: float = 2.0,
) -> tuple[Array, Cache, Array]:
    """Draw positions `known` .. `until` of `tokens` (S,), up to a stop token. The first `read` tokens are in the
    `cache`. Returns the tokens, the cache, and how many tokens are known now. Jit with `a` static. Positions rotate by the
    angles of a row of `known` tokens.

    The token at a position depends only on the seed, the position and the tokens before it.
    """
    decoder = assembled(a, weights, adapter_scale)
    block = min(PREFILL_TOKENS, tokens.shape[0])
    key = jax.random.key(choice.seed)

    def prefill(carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        position, cache = carry
        part = lax.dynamic_slice(tokens, (position,), (block,))
        return position + block, _read(decoder, part, position, known, cache)[1]

    def is_unfinished(carry: tuple[Array, Array, Cache]) -> Array:
        position, tokens, _ = carry
        stopped = (position >= known) & jnp.any(tokens[position] == choice.stop)
        return (position < until - 1) & ~stopped

    def draw(carry: tuple[Array, Array, Cache]) -> tuple[Array, Array, Cache]:
        position, tokens, cache = carry
        x, cache = _read(decoder, tokens[position][None], position, known, cache)
        logits = decoder.logits(decoder.norm(x))[0, 0]
        position_key = jax.random.fold_in(key, position)
        drawn = choose(logits, choice.temperature, choice.top_k, choice.top_p, position_key)
        return position + 1, tokens.at[position + 1].set(drawn), cache

    # All known tokens but the last one, which is read when the token after it is drawn.
    _, cache = lax.while_loop(lambda carry: carry[0] < known - 1, prefill, (read, cache))
    last, tokens, cache = lax.while_loop(is_unfinished, draw, (known - 1, tokens, cache))
    return tokens, cache, last + 1


def _read(
    decoder: Decoder, tokens: Array, begin: Array, length: Array, cache: Cache
) -> tuple[Array, Cache]:
    """Read `tokens` (T,) at the positions from `begin` on. Returns the output of the last block (1, T, C) and the cache
    with their keys and values. Positions rotate by the angles of a row of `length` tokens."""
    a = decoder.architecture
    count, cached = tokens.shape[0], cache[0].shape[1]
    positions = begin + jnp.arange(count)
    x = decoder.embed(tokens[None], positions)  # (1, T, C)
    rotations = all_rotations(a, positions, length)
    graph, stacked = nnx.split(decoder.layers)

    def layer(carry: tuple[Array, Cache], inputs: Any) -> tuple[tuple[Array, Cache], None]:
        x, (keys, values) = carry
        index, weights, flag = inputs
        block = nnx.merge(graph, weights)
        rotation, window = rotation_and_window(a, rotations, flag, cached)
        q, k, v = block.attention.project(block.attention_norm(x), rotation)
        keys = lax.dynamic_update_slice(keys, k, (index, begin, 0, 0))  # (L, S, K, D)
        values = lax.dynamic_update_slice(values, v, (index, begin, 0, 0))
        y = _attend(a, q, keys[index], values[index], positions, window)
        return (block.after_attention(x, block.attention.output(y)), (keys, values)), None

    inputs = jnp.arange(a.layers), stacked, layer_flags(a)
    (x, cache), _ = lax.scan(layer, (x, cache), inputs)
    return x, cache


def _attend(
    a: Architecture, q: Array, keys: Array, values: Array, positions: Array, window: Array | None
) -> Array:
    """Attention (1, T, K·G·D) of queries (1, T, K·G, D) at `positions` (T,) to the cached keys and values (S, K, D)."""
    count, cached = q.shape[1], keys.shape[0]
    q = q.reshape(count, a.kv_heads, -1, a.head_size)  # (T, K, G, D)
    scores = jnp.einsum("tkgd,skd->kgts", q, keys) * a.scale
    if a.attention_cap is not None:
        scores = a.attention_cap * jnp.tanh(scores / a.attention_cap)
    column = jnp.arange(cached)
    visible = column <= positions[:, None]  # (T, S)
    if window is not None:
        visible &= positions[:, None] - column < window
    attention = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("kgts,skd->tkgd", attention, values).reshape(1, count, -1)


def choose(
    logits: Array, temperature: Array, top_k: Array, top_p: Array | float, key: Array
) -> Array:
    """Draw one token from softmax(logits / temperature) of logits (V,), restricted to the `top_k` most likely tokens and
    then to the fewest of these whose probabilities add up to `top_p` (Holtzman et al. 2020, §3.1)."""
    vocab = logits.shape[0]
    count = jnp.where(top_k <= 0, vocab, jnp.minimum(top_k, vocab))
    descending = jnp.sort(logits)[::-1]
    descending = jnp.where(jnp.arange(vocab) < count, descending, -jnp.inf)
    scale = jnp.maximum(temperature, 1e-6)
    probabilities = jax.nn.softmax(descending / scale)
    more_likely = jnp.cumsum(probabilities) - probabilities
    is_candidate = (more_likely < top_p) & (descending > -jnp.inf)
    threshold = jnp.min(jnp.where(is_candidate, descending, jnp.inf))
    drawn = jax.random.categorical(key, jnp.where(logits >= threshold, logits, -jnp.inf) / scale)
    return jnp.where(temperature <= 0, jnp.argmax(logits), drawn).astype(jnp.int32)
