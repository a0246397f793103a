"""The rows of one epoch as a Grain pipeline whose state is a few numbers.

Streaming: blocks in shuffled order → tokens → rows → window shuffle. Otherwise: rows of one array
in globally shuffled order. The order depends only on (seed, epoch), and the state is a position in
it, so a new process continues with exactly the next row.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memconsole_trainer.data.text.tokens.tokenizer import Tokens
from memconsole_trainer.data.text.tokens.tokens import ArrayRows, TokenBlocks
from memconsole_trainer.randomness import generator

STORED_PERMUTATION = 1 << 16
ARRAY_ROWS = 64
"""Rows of an array that are cut at a time."""


def load_grain() -> Any:
    """Import Grain without JAX and Orbax, which it would import if installed. JAX costs a torch trainer
    1.4 s and 130 MB; Orbax costs a JAX trainer 0.5 s.

    Nothing used here needs them.
    """
    hidden = [name for name in ("jax", "orbax") if name not in sys.modules]
    logger = logging.getLogger("absl")
    level = logger.level
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    if hidden:
        logger.setLevel(logging.ERROR)
    try:
        import grain
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
        logger.setLevel(level)
    return grain


@dataclass(frozen=True)
class Source:
    """The train tokens of a source: in blocks, or all of them in one array."""

    blocks: TokenBlocks
    held: Tokens | None = None


@dataclass(frozen=True)
class Other:
    """A source that is mixed with the first one, and its share of the rows."""

    source: Source
    share: float


def epoch_rows(
    first: Source, others: Sequence[Other], seed: int, epoch: int, shuffle_buffer: int
) -> Any:
    """A Grain dataset of an epoch's rows: those of `first`, mixed with `others`. Rows of blocks are
    shuffled in a window, rows of an array over all of them."""
    load_grain()
    from memconsole_trainer.data.text.rows import cutting, mixing

    rows = _rows(first, seed, str(epoch))
    if others:

        def passes(number: int, source: Source) -> mixing.Pass:
            return lambda time: _rows(source, seed, f"{number}.{time}")

        shares = [1.0 - math.fsum(other.share for other in others), *(o.share for o in others)]
        again = [passes(number, other.source) for number, other in enumerate(others, 1)]
        rows = mixing.Mixed(rows, again, shares, seed, f"order/mix/{epoch}")
    if first.held is not None or shuffle_buffer < 2:
        return rows
    return cutting.WindowShuffle(rows, shuffle_buffer, seed, f"order/window/{epoch}")


def next_epoch(state: dict[str, Any]) -> dict[str, Any]:
    """The state in which the next epoch begins, after one that ended in `state`: the other sources of a mixture
    continue where they are."""
    inner = state.get("before", state)
    begin = {"row": 0, "first": None, "others": inner["others"]}
    return {"before": begin, "window": -1, "yielded": 0} if "before" in state else begin


def _rows(source: Source, seed: int, name: str) -> Any:
    """A Grain dataset of the rows of one source, in the order of `name`."""
    from memconsole_trainer.data.text.rows import cutting

    blocks = source.blocks
    if source.held is not None:
        rows = ArrayRows(source.held, blocks.row_tokens, blocks.stride)
        return _shuffled(len(rows), seed, f"order/rows/{name}", rows.several, lambda: ARRAY_ROWS)
    if blocks.count is None:
        parent: Any = cutting.Sequential(blocks)
    else:
        purpose = f"order/blocks/{name}"
        parent = _shuffled(blocks.count, seed, purpose, blocks.several, lambda: blocks.together)
    return cutting.Rows(parent, blocks.row_tokens, blocks.stride)


def _shuffled(
    count: int,
    seed: int,
    purpose: str,
    read: Callable[[Sequence[int]], list[Any]],
    together: Callable[[], int],
) -> Any:
    """A Grain dataset of what `read` returns for every number below `count`, in random order. `read` is called
    with `together()` numbers at a time.

    Grain's shuffle needs no memory, but its permutation walks a cycle of 65,536. With few numbers
    this takes milliseconds per number, so a permutation is stored instead; it is small.
    """
    grain = load_grain()
    from memconsole_trainer.data.text.rows import cutting

    random = generator(seed, purpose)
    if count <= STORED_PERMUTATION:
        return cutting.Permuted(random.permutation(count).tolist(), read, together)
    order = grain.MapDataset.range(count).shuffle(seed=int(random.integers(2**31)))
    return cutting.Permuted(order, read, together)
