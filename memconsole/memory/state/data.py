"""How much data a plan trains on, and how much of it the host holds, as far as the catalog knows."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from memconsole.given_path import given_path
from memconsole.plan import catalog
from memconsole.plan.catalog.entries import DatasetEntry
from memconsole.plan.catalog.folders import PACKED, known_folder
from memconsole.plan.catalog.line_sizes import line_bytes, share_of_first
from memconsole.plan.catalog.parquet_sizes import ColumnSize, column_size
from memconsole.plan.catalog.sources import BYTES_PER_TOKEN, PIECE_BYTES
from memconsole.plan.data.counted import counted_tokens
from memconsole.plan.data.mixture import parts
from memconsole.plan.data.rows import row_bytes, row_fill, training_rows
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import DataChoice, Plan, PlanError
from memconsole.plan.tasks import task_for
from memconsole.units import GIB

ROW_OVERHEAD_BYTES = 152
"""An array object and its place in the window, per row held."""

AHEAD_BYTES = 64 << 20
"""Most bytes of rows that are prepared ahead of the device: `memconsole_trainer.data.stream.AHEAD_BYTES`."""
AHEAD_BATCHES = 8
"""Fewest batches that are prepared ahead of the device: `memconsole_trainer.data.stream.AHEAD_BATCHES`."""
HELD_BYTES = 16 << 20
"""Most bytes of windows of one side of the split: `memconsole_trainer.tasks.regression.HELD_BYTES`."""
TABLE_LIBRARIES_BYTES = 106 << 20
"""Resident memory of the libraries that read tables: `datasets`, pandas and pyarrow, which are imported for a run on tables
alone. `python -m pytest tests/training/data/test_table_libraries.py` measures it."""
LINES_BYTES = 256 << 20
"""JSON Lines up to this size are not read as tables: `memconsole_trainer.data.sources.json_texts.MOST_BYTES`."""
MOST_FOOTERS = 32
"""Parquet files of a folder whose footers are read, at even distances. The others are taken to hold as much text for
their size."""
UNSEEN_SHARE = 0.1
"""`memconsole_trainer.data.windows.split.UNSEEN_SHARE`."""


JOINED_BYTES = 16 << 20
"""Tokens collected before they are added to those that are held: `memconsole_trainer.data.text.portion.JOINED_BYTES`."""


def data_bytes(plan: Plan, vocab_size: int) -> int:
    """Host bytes of the data. Streaming holds the rows of the shuffle buffer and as many ahead of the device; otherwise
    all tokens are held, and some more while they are collected. Two effective batches of int32 inputs and targets are
    added."""
    token = 2 if vocab_size <= 65_536 else 4
    tokens = dataset_tokens(plan)
    arrays = 3 if plan.data.isolate_documents else 2
    batches = 2 * 4 * arrays * plan.tokens_per_step // plan.device.count
    if not plan.data.streaming:
        held = token * (tokens or 0)
        return batches + held + min(held, JOINED_BYTES)
    rows = plan.data.shuffle_buffer
    if tokens is not None:
        rows = min(rows, tokens // plan.stride + 1)
    row = token * (plan.data.sequence_length + 1)
    return batches + rows * (row + ROW_OVERHEAD_BYTES) + min(rows * row, AHEAD_BYTES)


LEAST_CACHED_TOKENS = 1 << 18
"""About the tokens of the smallest text whose tokens are kept: `memconsole_trainer.data.text.blocks.token_key.LEAST_BYTES`."""


def cache_bytes(plan: Plan, model: Model) -> int | None:
    """Bytes of disk for the tokens that are kept between epochs and runs; None if the size of the text is unknown."""
    if not isinstance(model, Architecture) or not plan.data.cache_gib:
        return 0
    tokens = dataset_tokens(plan)
    if tokens is None:
        return None
    if tokens < LEAST_CACHED_TOKENS:
        return 0
    wide = model.vocab_size > (32_767 if plan.data.template is not None else 65_536)
    return min(round((4 if wide else 2) * _train_share(plan) * tokens), plan.data.cache_gib * GIB)


def waiting_bytes(plan: Plan, model: Model) -> int:
    """Host bytes of numeric rows: those in the shuffle buffer, and the batches that wait for the device. They are
    loaded before the model is built, so a CPU's tensors do not include them. The buffer is not counted larger than the
    file, if its size is known. A task without a buffer has all rows in memory."""
    buffered = "data.shuffle_buffer" not in task_for(plan, model).not_applicable(plan)
    row, rows = row_bytes(plan, model), plan.data.shuffle_buffer if buffered else 0
    each = plan.train.batch_size * plan.optimize.accumulation_steps
    most = max(AHEAD_BYTES // (row * each), 2)
    ahead = min(max(rows // each, AHEAD_BATCHES), most) * each
    size = _file_bytes(plan.data)
    held = rows
    if size is not None:
        held = min(rows, size // row) if buffered else size // row
    return (held + ahead) * row


def held_out_bytes(plan: Plan, model: Model) -> int:
    """Host bytes of the windows that are kept for evaluation: held-out rows, and those of systems that are held out
    whole."""
    rows = training_rows(plan, model)
    if rows is None or not isinstance(model, Regressor):
        return 0
    row, held = row_bytes(plan, model), plan.data.validation_fraction
    shares = (held, UNSEEN_SHARE if held else 0.0)
    return sum(min(HELD_BYTES, int(rows * share) * row) for share in shares)


def _stamp(data: DataChoice) -> tuple[int, int] | None:
    """The time of the last change and the size of the file or folder that `data.source` names; None if there is none. It is
    asked once a second, because a key press prices dozens of plans."""
    return _stamp_in(data.source, int(time.monotonic()))


@lru_cache(maxsize=16)
def _stamp_in(source: str, second: int) -> tuple[int, int] | None:
    known = catalog.datasets().get(source)
    try:
        status = os.stat(given_path(known.where if known is not None else source))
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size


def _file_bytes(data: DataChoice) -> int | None:
    return _file_bytes_of(data, _stamp(data))


@lru_cache(maxsize=256)
def _file_bytes_of(data: DataChoice, stamp: object) -> int | None:
    try:
        return catalog.dataset(Plan(data=data)).bytes
    except PlanError:
        return None


def table_bytes(plan: Plan) -> int:
    """Host bytes of the libraries that read tables; 0 if no source of `plan` is read as one."""
    return TABLE_LIBRARIES_BYTES if any(_is_table(part.plan.data) for part in parts(plan)) else 0


def _is_table(data: DataChoice) -> bool:
    """Whether the trainer reads `data.source` as a table."""
    return _is_table_of(data, _stamp(data))


@lru_cache(maxsize=256)
def _is_table_of(data: DataChoice, stamp: object) -> bool:
    try:
        entry = catalog.dataset(Plan(data=data))
        inside = known_folder(Path(entry.where)) if entry.format == "directory" else None
    except PlanError:
        return False
    form = entry.format if inside is None else inside.format
    if form in ("json", "jsonl") and data.template is not None:
        return False
    if form == "jsonl":
        return (entry.bytes or 0) > LINES_BYTES
    return entry.kind == "hub" or form in ("csv", "parquet", "json", "arrow")


def training_tokens(plan: Plan) -> int | None:
    """Tokens of one epoch, repeated ones of overlapping rows included; None if unknown. An epoch is a pass over
    `data.source`, plus the tokens of other sources by their shares. If an earlier run has counted the tokens, its count
    is used instead of a guess."""
    trained: float | None = counted_tokens(plan)
    if trained is None:
        pairs = _records(plan.data) if plan.learns_pairs else None
        # Each answer of a pair has a row of its own, which is padded.
        tokens = 2 * pairs * plan.stride if pairs is not None else _source_tokens(plan.data)
        trained = None if tokens is None else _train_share(plan) * tokens
    if trained is None:
        return None
    rows = trained / plan.stride / parts(plan)[0].share
    return max(1, int(rows)) * plan.data.sequence_length


def _train_share(plan: Plan) -> float:
    """The share of a source's documents that is trained on."""
    return 1.0 if plan.data.validation else 1.0 - plan.data.validation_fraction


def units_per_row(plan: Plan, model: Model) -> int:
    """The task's units (tokens, windows or interactions) in a row, without the padding that is expected in it."""
    return max(1, round(row_fill(plan, model) * task_for(plan, model).units_per_row(plan)))


def units_per_step(plan: Plan, model: Model) -> int:
    """The task's units in one optimizer step over all devices, without padding."""
    return plan.effective_batch * units_per_row(plan, model)


def training_units(plan: Plan, model: Model) -> int | None:
    """The task's units in one epoch; None if unknown."""
    if isinstance(model, Architecture):
        return training_tokens(plan)
    rows = training_rows(plan, model)
    return None if rows is None else rows * units_per_row(plan, model)


def dataset_tokens(plan: Plan) -> int | None:
    """Tokens of everything that is trained on, or None."""
    found = [_source_tokens(part.plan.data) for part in parts(plan)]
    known = [tokens for tokens in found if tokens is not None]
    return sum(known) if len(known) == len(found) else None


def _source_tokens(data: DataChoice) -> int | None:
    """Tokens of `data.source`, or None."""
    return _source_tokens_of(data, _stamp(data))


@lru_cache(maxsize=256)
def _source_tokens_of(data: DataChoice, stamp: object) -> int | None:
    try:
        entry = catalog.dataset(Plan(data=data))
    except PlanError:
        return None
    if data.template is None and (text := _text_size(entry, data.text_column)):
        share = (
            1.0 if data.max_examples is None else min(1.0, data.max_examples / max(1, text.rows))
        )
        return max(1, int(text.bytes * share / BYTES_PER_TOKEN["text"]))
    if entry.tokens is None or data.max_examples is None:
        return entry.tokens
    if entry.file_bytes and entry.bytes:
        return int(entry.tokens * _first_bytes(entry.file_bytes, data.max_examples) / entry.bytes)
    if entry.documents:
        return int(entry.tokens * min(1.0, data.max_examples / entry.documents))
    return _first_records(entry, data.max_examples)


def _records(data: DataChoice) -> float | None:
    """About the records of `data.source`; None if nothing tells before a run."""
    return _records_of(data, _stamp(data))


@lru_cache(maxsize=256)
def _records_of(data: DataChoice, stamp: object) -> float | None:
    try:
        entry = catalog.dataset(Plan(data=data))
        found: float | None = entry.documents
        if found is None and entry.kind == "file" and entry.format in ("jsonl", "csv"):
            path = Path(entry.where)
            each = line_bytes(path)
            text_bytes = (entry.bytes or 0) * PACKED.get(path.suffix.lower(), 1.0)
            found = None if each is None else text_bytes / each
    except (PlanError, OSError):
        return None
    return found if found is None or data.max_examples is None else min(found, data.max_examples)


def _first_records(entry: DatasetEntry, records: int) -> int | None:
    """Tokens of the first `records` lines of a file of records; None of other data."""
    if entry.kind != "file" or entry.format not in ("jsonl", "csv") or not entry.bytes:
        return None
    path = Path(entry.where)
    text_bytes = entry.bytes * PACKED.get(path.suffix.lower(), 1.0)
    share = share_of_first(path, text_bytes, records)
    return None if share is None or entry.tokens is None else max(1, int(entry.tokens * share))


def _text_size(entry: DatasetEntry, column: str) -> ColumnSize | None:
    """The text in the Parquet file or files of `entry`; None for other data, or if one of the files does not tell it."""
    files: tuple[Path, ...] = ()
    sizes: tuple[int, ...] = ()
    if entry.kind == "file" and entry.format == "parquet":
        return column_size(Path(entry.where), column)
    if entry.kind == "file" and entry.format == "directory":
        inside = known_folder(Path(entry.where))
        if inside is not None and inside.format == "parquet":
            files, sizes = inside.files, inside.sizes
    step = max(1, -(-len(files) // MOST_FOOTERS))
    rows = size = 0
    for path in files[::step]:
        found = column_size(path, column)
        if found is None:
            return None
        rows, size = rows + found.rows, size + found.bytes
    if not files:
        return None
    scale = sum(sizes) / max(1, sum(sizes[::step]))
    return ColumnSize(int(rows * scale), int(size * scale))


@lru_cache(maxsize=256)
def _first_bytes(sizes: Sequence[int], documents: int) -> int:
    """Estimated bytes of the first `documents` documents of text files of these `sizes`."""
    total = 0
    for size in sizes:
        if documents <= 0:
            break
        pieces = max(1, -(-size // PIECE_BYTES) - 1)
        total += size if pieces <= documents else documents * PIECE_BYTES
        documents -= pieces
    return total
