"""Records as blocks of rows: tokenized, marked and packed whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.plan import PlanError
from memconsole_trainer.data.sources.documents import Documents
from memconsole_trainer.data.sources.records import RecordDocuments, StreamRecords
from memconsole_trainer.data.sources.split import Split
from memconsole_trainer.data.text.blocks import packing
from memconsole_trainer.data.text.blocks.packing import Cuts
from memconsole_trainer.data.text.blocks.text_blocks import TextBlocks
from memconsole_trainer.data.text.rows.batches import Boundary
from memconsole_trainer.data.text.rows.validation import MOST_TOKENS, Validation, held_out_texts
from memconsole_trainer.data.text.tokens.marked import encode, ids
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, Tokens, bytes_by_offsets
from memconsole_trainer.data.text.tokens.tokens import ArrayRows

CODED_RECORDS = 20_000
"""Records that are searched for codes."""


class RecordBlocks(TextBlocks):
    """Blocks of whole rows: each row holds whole records, and padding at its end."""

    def __init__(
        self,
        documents: Documents,
        split: Split,
        tokenizer: Tokenizer,
        sequence_length: int,
        answers_only: bool,
        boundary: Boundary | None = None,
    ) -> None:
        """With a `boundary` documents are isolated."""
        super().__init__(documents, split, tokenizer, sequence_length, sequence_length + 1)
        self._answers_only, self._boundary = answers_only, boundary

    def _encoded(self, texts: Sequence[str]) -> list[Tokens]:
        found = encode(self._tokenizer, texts, self._answers_only, offsets=False)
        return [one.tokens for one in found]

    def _joined(self, documents: Sequence[Tokens]) -> tuple[Tokens, Cuts]:
        self._check_boundary(documents)
        rows = packing.placed([len(d) for d in documents], self.row_tokens)
        tokens = packing.laid(documents, rows, self.row_tokens)
        return tokens, packing.cuts(documents, self.row_tokens)

    def _check_boundary(self, documents: Sequence[Tokens]) -> None:
        """Raise `PlanError` if a record holds the token that ends a document."""
        if self._boundary is None:
            return
        end = self._boundary.token
        if any((ids(tokens[:-1]) == end).any() for tokens in documents):
            raise PlanError(
                "data.isolate_documents = true: the template writes "
                f"{self._tokenizer.decode([end])} within a record, which would be taken for its "
                "end; set it to false",
                "data.isolate_documents",
            )


def held_out_records(
    source: Documents,
    split: Split,
    tokenizer: Tokenizer,
    length: int,
    answers_only: bool,
    most: int = MOST_TOKENS,
) -> Validation:
    """The held-out records in rows, packed as those that are trained on."""
    found: dict[int, tuple[Tokens, NDArray[np.int32]]] = {}
    total = 0
    for number, text in held_out_texts(source, split):
        one = encode(tokenizer, [text], answers_only)[0]
        covered = np.zeros(len(one.tokens), np.int32)
        covered[: len(one.offsets)] = bytes_by_offsets(text, one.offsets)
        covered[ids(one.tokens) == tokenizer.unknown] = 0
        found[number] = one.tokens, covered
        total += len(one.tokens)
        if total >= most:
            break
    documents = [found[number][0] for number in sorted(found)]
    sizes = [found[number][1] for number in sorted(found)]
    rows = packing.placed([len(d) for d in documents], length + 1)
    tokens = packing.laid(documents, rows, length + 1)
    covered_rows = packing.laid(sizes, rows, length + 1)
    return Validation(
        rows=ArrayRows(tokens, length + 1, length + 1),
        tokens=total,
        token_bytes=ArrayRows(covered_rows, length + 1, length + 1),
        prompt=[],
    )


def frequent_codes(source: Documents, split: Split, field: str | None, most: int) -> list[str]:
    """The most frequent values of a field in the first train records."""
    if field is None or not isinstance(source, RecordDocuments | StreamRecords):
        return []
    found: Counter[str] = Counter()
    limit = min(CODED_RECORDS, source.count or CODED_RECORDS)
    numbers = np.flatnonzero(~split.held_out(0, limit)).tolist()
    for record in source.records(numbers):
        value = record.fields.get(field)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str | int) and str(one).strip():
                found[str(one).strip()] += 1
    return [code for code, _ in found.most_common(most)]
