"""The rows of one epoch as a Grain pipeline whose state is a few numbers.

Streaming: blocks in shuffled order → tokens → rows → window shuffle. Otherwise: rows of one array
in globally shuffled order. The order depends only on (seed, epoch), and the state is a position in
it, so a new process continues with exactly the next row.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from memconsole_trainer.data.text.tokenizer import Tokens
from memconsole_trainer.data.text.tokens import ArrayRows, TokenBlocks
from memconsole_trainer.randomness import generator

STORED_PERMUTATION = 1 << 16
ARRAY_ROWS = 64
"""Rows of an array that are cut at a time."""


def load_grain() -> Any:
    """Import Grain without JAX, which it would import if installed. JAX costs a torch trainer 1.4 s
    and 130 MB.

    Nothing used here needs JAX.
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
    """A Grain dataset of the epoch's rows, tokenized on the fly. The shuffle window bounds its
    memory."""
    load_grain()
    from memconsole_trainer.data.text import cutting

    if blocks.count is None:
        parent: Any = cutting.Sequential(blocks)
    else:
        parent = _shuffled(
            blocks.count, seed, f"order/blocks/{epoch}", blocks.several, lambda: blocks.together
        )
    rows = cutting.Rows(parent, blocks.row_tokens, blocks.stride)
    if shuffle_buffer < 2:
        return rows
    return cutting.WindowShuffle(rows, shuffle_buffer, seed, f"order/window/{epoch}")


def array_rows(tokens: Tokens, row_tokens: int, stride: int, seed: int, epoch: int) -> Any:
    """A Grain dataset of the rows of one array, shuffled over all rows."""
    rows = ArrayRows(tokens, row_tokens, stride)
    return _shuffled(len(rows), seed, f"order/rows/{epoch}", rows.several, lambda: ARRAY_ROWS)


def _shuffled(
    count: int,
    seed: int,
    purpose: str,
    read: Callable[[Sequence[int]], list[Any]],
    together: Callable[[], int],
) -> Any:
    """What `read` returns for every number below `count`, in random order. It is given `together`
    numbers at a time.

    Grain's shuffle needs no memory, but its permutation walks a cycle of 65,536. With few numbers
    this takes milliseconds per number, so a permutation is stored instead; it is small.
    """
    grain = load_grain()
    from memconsole_trainer.data.text import cutting

    random = generator(seed, purpose)
    if count <= STORED_PERMUTATION:
        return cutting.Permuted(random.permutation(count).tolist(), read, together)
    order = grain.MapDataset.range(count).shuffle(seed=int(random.integers(2**31)))
    return cutting.Permuted(order, read, together)
