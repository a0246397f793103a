"""A block of tokens, and facts about the texts that it was made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

from memconsole_trainer.data.text.blocks.packing import Cuts
from memconsole_trainer.data.text.tokens.tokenizer import Tokens

NAMES_BYTES = 64
"""Bytes of the names of roles that are kept with a block."""


class Roles(NamedTuple):
    """Roles of messages, and how many train records have such messages."""

    records: int = 0
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, records: Sequence[Collection[str]]) -> Self:
        """Of the roles of each record."""
        return cls(sum(map(bool, records)), frozenset().union(*records))

    def joined(self, other: Roles) -> Roles:
        """Both together."""
        return Roles(self.records + other.records, self.names | other.names)

    def kept(self) -> tuple[int, bytes]:
        """The count and the names as bytes."""
        return self.records, ",".join(sorted(self.names)).encode("utf-8", "replace")[:NAMES_BYTES]

    @classmethod
    def read(cls, records: int, names: bytes) -> Self:
        """What `kept` gave."""
        words = names.decode("utf-8", "ignore")
        return cls(records, frozenset(filter(None, words.split(","))))


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
    unwritten_roles: Roles = Roles()
    """Roles whose messages the template does not write."""
    unknown_roles: Roles = Roles()
    """Roles that the template does not know, and writes as any other."""

    def joined(self, other: Facts) -> Facts:
        """Both together."""
        return Facts(
            self.documents + other.documents,
            self.train_bytes + other.train_bytes,
            self.left_out + other.left_out,
            self.cuts.joined(other.cuts),
            self.tools + other.tools,
            self.reasoning + other.reasoning,
            self.unwritten_roles.joined(other.unwritten_roles),
            self.unknown_roles.joined(other.unknown_roles),
        )


class Made(NamedTuple):
    """A block's tokens, and facts about their texts."""

    tokens: Tokens
    facts: Facts
