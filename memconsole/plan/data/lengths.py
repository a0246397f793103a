"""Document lengths of a plan's data in tokens: the record of a measurement, and its cache key."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Literal

import msgspec

from memconsole.plan import catalog
from memconsole.plan.catalog.sources import PIECE_BYTES
from memconsole.plan.data.paths import located
from memconsole.plan.plan import Plan

VERSION = 2
"""Part of every cache key. Increase it if lengths are measured in another way."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per document, end-of-text token included. A long file of text is several documents."""

    kind: Literal["packed", "rows"]
    """packed: documents are joined and cut, so that every row is full. rows: the file's own rows of tokens, all
    of one width."""
    documents: int
    """Number of documents that were measured."""
    exact: bool
    """Whether all documents were measured."""
    p50: int
    p99: int
    longest: int
    tokenizer: str
    """Description of the tokenizer; empty for rows of tokens."""


def percentile(ordered: list[int], share: float) -> int:
    """The smallest value such that at least `share` of the values are no larger (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def lengths_key(plan: Plan) -> str:
    """The cache key of the lengths: the data on disk, the selected part, and the tokenizer. Raises `PlanError`."""
    plan = located(plan)  # so that the console finds what a run has counted
    entry, data = catalog.dataset(plan), plan.data
    parts: list[object] = [
        VERSION, entry.kind, entry.where, entry.config, entry.bytes, entry.documents, data.source, data.text_column,
        data.split, data.max_examples, data.template, data.lowercase, data.code_field,
    ]  # fmt: skip
    if entry.kind == "file":
        parts += [changed(Path(entry.where).expanduser()), PIECE_BYTES]
    if data.tokenizer is not None:
        parts += [data.tokenizer, changed(Path(data.tokenizer).expanduser())]
    else:
        vocabulary = catalog.architecture(plan).vocab_size
        parts += [
            catalog.model_directory(plan), min(data.vocab_size or vocabulary, vocabulary),
            data.tokenizer_examples, data.validation_fraction, data.held_out, data.characters,
        ]  # fmt: skip
    if plan.learns_pairs:
        parts += [plan.train.objective]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def changed(path: Path) -> tuple[int, int] | None:
    """A file's modification time in ns and its bytes; None if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
