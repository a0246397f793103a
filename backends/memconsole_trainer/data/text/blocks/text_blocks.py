"""Documents as blocks of tokens, tokenized on the fly: several blocks at once, so that every thread
of the tokenizer has work."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from memconsole.plan.templates.chat import REASONING, TOOLS
from memconsole_trainer.data.sources.documents import Documents, FileDocuments, StreamDocuments
from memconsole_trainer.data.sources.hashes import text_hash
from memconsole_trainer.data.sources.split import Split
from memconsole_trainer.data.text.blocks.block import Facts, Made, Roles
from memconsole_trainer.data.text.blocks.held_tokens import HeldTokens
from memconsole_trainer.data.text.blocks.packing import Cuts
from memconsole_trainer.data.text.blocks.token_cache import TokenCache
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, Tokens, byte_length, threads

THREAD_BYTES = 128 << 10
"""Text that one call gives to each thread of the tokenizer. More would only take memory: the library
holds about 100 bytes for each token until they are copied."""
MOST_TOGETHER = 256


class TextBlocks:
    """Documents tokenized on the fly, or read from a cache of what was tokenized before."""

    def __init__(
        self,
        documents: Documents,
        split: Split,
        tokenizer: Tokenizer,
        sequence_length: int,
        stride: int,
    ) -> None:
        self._source = documents
        self._split = split
        self._tokenizer = tokenizer
        self._size = documents.block_size
        self.count = None if documents.count is None else -(-documents.count // self._size)
        self.row_tokens = sequence_length + 1
        self.stride = stride
        self.cache: TokenCache | HeldTokens | None = None
        self.left_out: frozenset[int] = frozenset()
        """Hashes of texts that are not trained on, because they are validated on."""
        self.seen = Facts()
        """Facts about the blocks that were returned so far."""
        self._blocks_seen = 0

    @property
    def fraction(self) -> float:
        """Share of the documents that the split holds out."""
        return self._split.fraction

    def train_bytes(self) -> int | None:
        """UTF-8 bytes of the train documents, if the source is files, else None."""
        if not isinstance(self._source, FileDocuments):
            return None
        return int(self._source.sizes[~self._split.held_out(0, len(self._source.sizes))].sum())

    @property
    def together(self) -> int:
        """The best number of blocks to request at once: enough text for all threads."""
        if not self._blocks_seen:
            return 1
        each = max(1, self.seen.train_bytes // self._blocks_seen)
        return min(max(1, threads() * THREAD_BYTES // each), MOST_TOGETHER)

    def block(self, index: int) -> Tokens:
        return self.several([index])[0]

    def several(self, indices: Sequence[int]) -> list[Tokens]:
        return [self._handed(made) for made in self._of_source(indices)]

    def iterate(self, start: int) -> Iterator[Tokens]:
        if isinstance(self._source, StreamDocuments):
            yield from self._streamed(self._source, start)
            return
        count = self.count or 0
        while start < count:
            stop = min(start + self.together, count)
            for made in self._of_source(range(start, stop)):
                yield self._handed(made)
            start = stop

    def _streamed(self, source: StreamDocuments, start: int) -> Iterator[Tokens]:
        while (kept := self._kept(start)) is not None:
            yield self._handed(kept)
            start += 1
        if self.cache is not None and self.cache.ended == start:
            return
        texts = source.iterate(start * self._size)
        while batch := list(itertools.islice(texts, self._size * self.together)):
            groups = [batch[i : i + self._size] for i in range(0, len(batch), self._size)]
            for index, made in enumerate(self._made(list(enumerate(groups, start))), start):
                self._keep(index, made)
                yield self._handed(made)
            start += len(groups)
        if self.cache is not None:
            self.cache.end(start)

    def _of_source(self, indices: Sequence[int]) -> list[Made]:
        """Blocks of a source with random access."""
        found = {index: self._kept(index) for index in indices}
        missing = [index for index, made in found.items() if made is None]
        fresh = self._made([(index, self._texts(index)) for index in missing])
        for index, made in zip(missing, fresh, strict=True):
            self._keep(index, made)
            found[index] = made
        return [made for made in found.values() if made is not None]

    def _kept(self, index: int) -> Made | None:
        """A block from the cache; None if it is not there. Its texts count as read."""
        kept = self.cache.get(index) if self.cache is not None else None
        if kept is None:
            return None
        if kept.source and self._source.block_hashes is not None:
            self._source.block_hashes.assume(index, kept.source)
        return kept.made

    def _keep(self, index: int, made: Made) -> None:
        if self.cache is not None:
            hashes = self._source.block_hashes
            self.cache.put(index, made, hashes.known(index) if hashes is not None else 0)

    def _texts(self, index: int) -> list[str]:
        start = index * self._size
        assert self._source.count is not None
        return self._source.read(start, min(start + self._size, self._source.count))

    def _made(self, groups: Sequence[tuple[int, list[str]]]) -> list[Made]:
        """The blocks of these numbers and texts, tokenized in one call."""
        chosen = [self._train_texts(index * self._size, texts) for index, texts in groups]
        train = [self._other_texts(texts) for texts in chosen]
        encoded = iter(self._encoded(list(itertools.chain.from_iterable(train))))
        found = []
        for (_, texts), own, kept in zip(groups, chosen, train, strict=True):
            tokens, cuts = self._joined(list(itertools.islice(encoded, len(kept))))
            size = sum(map(byte_length, kept))
            parts = Counter(part for text in kept for part in getattr(text, "unwritten", ()))
            left, odd = (
                Roles.of([getattr(text, name, ()) for text in kept])
                for name in ("unwritten_roles", "unknown_roles")
            )
            facts = Facts(
                len(texts),
                size,
                len(own) - len(kept),
                cuts,
                parts[TOOLS],
                parts[REASONING],
                left,
                odd,
            )
            found.append(Made(tokens, facts))
        return found

    def _train_texts(self, start: int, texts: list[str]) -> list[str]:
        held = self._split.held_out(start, start + len(texts))
        return [text for text, out in zip(texts, held, strict=True) if not out]

    def _other_texts(self, texts: list[str]) -> list[str]:
        """The texts that are not also validated on."""
        if not self.left_out:
            return texts
        return [text for text in texts if text_hash(text) not in self.left_out]

    def _handed(self, made: Made) -> Tokens:
        self.seen = self.seen.joined(made.facts)
        self._blocks_seen += 1
        return made.tokens

    def _encoded(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text."""
        return self._tokenizer.encode_each(texts)

    def _joined(self, documents: Sequence[Tokens]) -> tuple[Tokens, Cuts]:
        """The tokens of a block's documents, one after another."""
        if not documents:
            return np.empty(0, dtype=self._tokenizer.dtype), Cuts()
        return np.concatenate(documents), Cuts()
