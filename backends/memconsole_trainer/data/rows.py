"""Rows of one epoch as a Grain pipeline whose state is a few numbers.

Streaming: blocks in shuffled order → tokens → rows → window shuffle. Otherwise: rows of one array in
globally shuffled order. The order is a function of (seed, epoch) alone, and the state names a place
in it, so a fresh process continues with exactly the next row.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from memconsole_trainer.data.tokens import ArrayRows, TokenBlocks
from memconsole_trainer.initialize import generator
from memconsole_trainer.tokenizer import Tokens


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
        import grain.experimental
    finally:
        if hidden:
            sys.modules.pop("jax", None)
            logger.setLevel(level)
    return grain


def epoch_seed(seed: int, epoch: int, purpose: str) -> int:
    """A 31-bit seed for one epoch's `purpose`."""
    return int(generator(seed, f"order/{purpose}/{epoch}").integers(2**31))


def streamed_rows(blocks: TokenBlocks, seed: int, epoch: int, shuffle_buffer: int) -> Any:
    """A Grain dataset of the epoch's rows, tokenized on the fly; memory is bounded by the window."""
    grain = load_grain()
    from memconsole_trainer.data import cutting

    if blocks.count is None:
        parent = cutting.Sequential(blocks)
    else:
        parent = (
            grain.MapDataset.range(blocks.count)
            .shuffle(seed=epoch_seed(seed, epoch, "blocks"))
            .map(blocks.block)
            .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        )
    rows = cutting.Rows(parent, blocks.row_tokens, blocks.stride)
    if shuffle_buffer < 2:
        return rows
    return grain.experimental.WindowShuffleIterDataset(
        rows, window_size=shuffle_buffer, seed=epoch_seed(seed, epoch, "window")
    )


def array_rows(tokens: Tokens, row_tokens: int, stride: int, seed: int, epoch: int) -> Any:
    """A Grain dataset of the rows of one array, in an order over all of them."""
    grain = load_grain()
    return (
        grain.MapDataset.source(ArrayRows(tokens, row_tokens, stride))
        .shuffle(seed=epoch_seed(seed, epoch, "rows"))
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )
