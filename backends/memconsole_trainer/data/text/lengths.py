"""Token lengths of a source's documents as training would tokenize them: of all, or of a spread
sample."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memconsole.plan import catalog
from memconsole.plan.data.lengths import Lengths, percentile
from memconsole.plan.models.files import TOKENIZER_JSON, tokenizer_file
from memconsole.plan.plan import Plan
from memconsole_trainer.data.sources.documents import (
    DataError,
    Documents,
    StreamDocuments,
)
from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.text.blocks.pair_blocks import pairs_of
from memconsole_trainer.data.text.opened import alone
from memconsole_trainer.data.text.run_tokenizer import make_tokenizer
from memconsole_trainer.data.text.tokens.marked import encode
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer

MOST_BYTES = 2 << 20
"""About how many bytes of text are tokenized. If a source is larger, evenly spaced documents are tokenized."""
MOST_DOCUMENTS = 8192
PROBED = 16
"""Documents read to estimate the mean length."""


class _Found:
    """Lengths found so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.exact = True


def measure_lengths(plan: Plan, source: Documents | TokenRows) -> Lengths:
    """Measure the documents of `source` in tokens. Raises `PlanError` and `DataError`."""
    if isinstance(source, TokenRows):
        width = source.width
        return Lengths(
            kind="rows", documents=source.count or 0, exact=True, p50=width, p99=width, longest=width,
            tokenizer="",
        )  # fmt: skip
    tokenizer, words = _tokenizer(plan, source)
    found = _Found()
    for texts in _texts(source, found):
        found.tokens += _counted(plan, tokenizer, texts)
    if not found.tokens:
        raise DataError(f"{plan.data.source}: holds no documents")
    ordered = sorted(found.tokens)
    return Lengths(
        kind="packed",
        documents=len(ordered),
        exact=found.exact,
        p50=percentile(ordered, 0.5),
        p99=percentile(ordered, 0.99),
        longest=ordered[-1],
        tokenizer=words,
    )


def _counted(plan: Plan, tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    """The number of tokens of each text; of a pair, of its longer answer. The tags that a template writes are single
    tokens."""
    if plan.data.template is None:
        return [len(tokens) for tokens in tokenizer.encode_each(texts)]
    if plan.learns_pairs:
        return [pair.shape[1] for pair in pairs_of(tokenizer, texts)]
    return [len(one.tokens) for one in encode(tokenizer, texts, False, offsets=False)]


def _tokenizer(plan: Plan, source: Documents) -> tuple[Tokenizer, str]:
    """The tokenizer that training would use, and a description of it."""
    architecture = catalog.architecture(plan)
    directory = catalog.model_directory(plan)
    beside = tokenizer_file(Path(directory)) if directory else None
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / TOKENIZER_JSON
        tokenizer = make_tokenizer(plan, architecture, alone(plan, source), saved, beside)
    assert tokenizer is not None
    entries = f"{tokenizer.vocab_size:,} entries"
    if plan.data.tokenizer is not None or beside is not None:
        return tokenizer, f"{plan.data.tokenizer or 'the one beside the model'}, {entries}"
    return tokenizer, f"trained on this data, {entries}"


def _texts(source: Documents, found: _Found) -> Iterator[list[str]]:
    """Yield evenly spaced blocks of texts; of a stream, the first ones."""
    if isinstance(source, StreamDocuments):
        size = 0
        for count, text in enumerate(source.iterate()):
            if size >= MOST_BYTES or count >= MOST_DOCUMENTS:
                found.exact = False
                return
            size += len(text)
            yield [text]
        return
    count, block = source.count or 0, source.block_size
    if count == 0:
        return
    probe = [source.read(index, index + 1)[0] for index in _spread(count, PROBED)]
    mean = max(1.0, sum(map(len, probe)) / len(probe))
    wanted = min(count, MOST_DOCUMENTS, max(PROBED, int(MOST_BYTES / mean)))
    found.exact = wanted == count
    if wanted < count and wanted <= PROBED * block:
        for index in _spread(count, wanted):  # few long texts: read them one by one
            yield source.read(index, index + 1)
        return
    blocks = -(-count // block)
    for index in _spread(blocks, max(1, min(blocks, wanted // block + (wanted == count)))):
        yield source.read(index * block, min((index + 1) * block, count))


def _spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` evenly spaced numbers below `count`."""
    numbers: list[int] = np.unique(
        np.linspace(0, count - 1, min(count, wanted)).round().astype(int)
    ).tolist()
    return numbers
