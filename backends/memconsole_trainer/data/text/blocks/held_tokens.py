"""Tokens of a small text, held in memory so that it is tokenized once."""

from __future__ import annotations

from memconsole_trainer.data.text.blocks.block import Made
from memconsole_trainer.data.text.blocks.token_cache import Kept


class HeldTokens:
    """The blocks of a text that is too small for the disk. Same methods as `TokenCache`."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}
        self.ended: int | None = None
        """Number of blocks of a stream that was read to its end."""

    def get(self, block: int) -> Kept | None:
        """A block; None if it was not made yet."""
        return self._kept.get(block)

    def put(self, block: int, made: Made, source: int = 0) -> None:
        """Keep a block, and the hash of the texts that it was made of."""
        self._kept[block] = Kept(made, source)

    def end(self, count: int) -> None:
        """Remember that a stream has `count` blocks."""
        self.ended = count
