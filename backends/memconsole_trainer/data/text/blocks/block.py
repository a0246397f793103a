"""A block of tokens, and facts about the texts that it was made of."""

from __future__ import annotations

from typing import NamedTuple

from memconsole_trainer.data.text.blocks.packing import Cuts
from memconsole_trainer.data.text.tokens.tokenizer import Tokens


class Facts(NamedTuple):
    """Counts of the texts that blocks were made of."""

    documents: int = 0
    """Number of documents, held-out ones included."""
    train_bytes: int = 0
    """UTF-8 bytes of the train documents."""
    left_out: int = 0
    """Train documents that are also in `data.validation`."""
    cuts: Cuts = Cuts()
    tools: int = 0
    """Train records whose tools the template does not write."""
    reasoning: int = 0
    """Train records whose reasoning the template does not write."""

    def joined(self, other: Facts) -> Facts:
        """Both together."""
        return Facts(
            self.documents + other.documents,
            self.train_bytes + other.train_bytes,
            self.left_out + other.left_out,
            self.cuts.joined(other.cuts),
            self.tools + other.tools,
            self.reasoning + other.reasoning,
        )


class Made(NamedTuple):
    """A block's tokens, and facts about their texts."""

    tokens: Tokens
    facts: Facts
