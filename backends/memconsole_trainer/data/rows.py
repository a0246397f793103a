"""Rows of one epoch as a Grain pipeline whose state is a few numbers.

Streaming: blocks in shuffled order → tokens → rows → window shuffle. Otherwise: rows of one array in
globally shuffled order. The order is a function of (seed, epoch) alone, and the state names a place
in it, so a fresh process continues with exactly the next row.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from memconsole_trainer.data.tokenizer import Tokens
from memconsole_trainer.data.tokens import ArrayRows, TokenBlocks
from memconsole_trainer.randomness import generator

STORED_PERMUTATION = 1 << 16


def load_grain() -> Any:
    """Grain, without the JAX it imports when it finds it: that costs a torch trainer 1.4 s and 130 MB.

    Grain has its own implementation of everything used here.
    """
    hidden = "jax" not in sys.modules
    logger = logging.getLogger("absl")
    level = logger.level
    if hidden:
        sys.modules["jax"] = None  # type: ignore[assignment]
        logger.setLevel(logging.ERROR)
    try:
        import grain
    finally:
        if hidden:
            sys.modules.pop("jax", None)
            logger.setLevel(level)
    return grain


def streamed_rows(blocks: TokenBlocks, seed: int, epoch: int, shuffle_buffer: int) -> Any:
    """A Grain dataset of the epoch's rows, tokenized on the fly; memory is bounded by the window."""
    load_grain()
    from memconsole_trainer.data import cutting

    if blocks.count is None:
        parent: Any = cutting.Sequential(blocks)
    else:
        parent = _shuffled(blocks.count, seed, f"order/blocks/{epoch}", blocks.block)
    rows = cutting.Rows(parent, blocks.row_tokens, blocks.stride)
    if shuffle_buffer < 2:
        return rows
    return cutting.WindowShuffle(rows, shuffle_buffer, seed, f"order/window/{epoch}")


def array_rows(tokens: Tokens, row_tokens: int, stride: int, seed: int, epoch: int) -> Any:
    """A Grain dataset of the rows of one array, in an order over all of them."""
    rows = ArrayRows(tokens, row_tokens, stride)
    return _shuffled(len(rows), seed, f"order/rows/{epoch}", rows.__getitem__)


def _shuffled(count: int, seed: int, purpose: str, element: Callable[[int], Any]) -> Any:
    """`element` of every number below `count`, in random order.

    Grain's shuffle needs no memory, but its permutation walks a cycle of 65,536: for few numbers that
    takes milliseconds each, and a stored permutation is small.
    """
    grain = load_grain()
    from memconsole_trainer.data import cutting

    random = generator(seed, purpose)
    if count <= STORED_PERMUTATION:
        return cutting.Permuted(random.permutation(count).tolist(), element)
    order = grain.MapDataset.range(count).shuffle(seed=int(random.integers(2**31)))
    return cutting.Permuted(order, element)
