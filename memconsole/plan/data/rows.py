"""How many rows an epoch of windows or histories has: as a run counted them, or as the files tell."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from memconsole import regular_file
from memconsole.plan import catalog
from memconsole.plan.catalog.entries import DatasetEntry
from memconsole.plan.catalog.rating_tables import RowError, TextTable
from memconsole.plan.catalog.windows import window_sizes
from memconsole.plan.data.counted import keep_count, kept_count
from memconsole.plan.data.lengths import changed
from memconsole.plan.errors import PlanError
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import DataChoice, Plan
from memconsole.plan.tasks import task_for

SAMPLE_BYTES = 1 << 18
"""How much of a rating file is read to guess how many rows it gives."""


def counted_rows(plan: Plan) -> int | None:
    """The training rows of `data.source` in its present state, as a run counted them; None if no run has."""
    return kept_count(plan, _name)


def keep_counted_rows(plan: Plan, train_rows: int) -> None:
    """Keep a count. If the cache cannot be written, later plans go on guessing."""
    keep_count(plan, train_rows, _name)


def training_rows(plan: Plan, model: Model) -> int | None:
    """Rows of one epoch of a task that does not read text; guessed from the size of the files until a run has counted
    them. None if the size is unknown too."""
    counted = counted_rows(plan)
    if counted is not None:
        return counted
    if isinstance(model, Recommender):
        histories = _histories(plan)
        return None if histories is None else histories.rows
    entry = _file(plan)
    if entry is None or entry.bytes is None:
        return None
    sizes = window_sizes(entry.where)
    rows = entry.bytes // row_bytes(plan, model) if sizes is None else sizes.rows
    rows = rows if plan.data.max_examples is None else min(rows, plan.data.max_examples)
    return max(1, int(rows * (1.0 - plan.data.validation_fraction)))


def row_fill(plan: Plan, model: Model) -> float:
    """The share of the positions of training rows that are no padding, 0 to 1; 1 if unknown."""
    histories = _histories(plan) if isinstance(model, Recommender) else None
    return 1.0 if histories is None else histories.fill


def row_bytes(plan: Plan, model: Model) -> int:
    """Bytes of one row of a batch, all arrays together."""
    return sum(array.row_bytes for array in task_for(plan, model).inputs(plan, model))


def _file(plan: Plan) -> DatasetEntry | None:
    """The data of a plan, if they are one file that is there."""
    try:
        entry = catalog.dataset(plan)
    except PlanError:
        return None
    return entry if entry.kind == "file" and entry.bytes is not None else None


class _Histories(NamedTuple):
    rows: int
    """Rows of training."""
    fill: float
    """The share of their positions that hold an item."""


def _histories(plan: Plan) -> _Histories | None:
    """What the rating file of a plan is guessed to give; None if it cannot be read."""
    entry = _file(plan)
    if entry is None:
        return None
    d, file = plan.data, Path(entry.where).expanduser()
    version = changed(file)
    if version is None:
        return None
    return _guessed(file, version, d, plan.stride)


@lru_cache(maxsize=64)
def _guessed(
    file: Path, version: tuple[int, int], data: DataChoice, stride: int
) -> _Histories | None:
    """The rows of the histories in a rating file, from the users of its first lines. None for Parquet, and for a file
    that is not read whole and not sorted by user: its lines do not tell how long histories are. `version`: its
    modification time in ns, and its bytes."""
    try:
        with regular_file.open_regular(file) as opened:
            head = opened.read(SAMPLE_BYTES)
        whole = head if len(head) == version[1] else head[: head.rfind(b"\n") + 1]
        read = [
            user
            for part in TextTable(file, io.BytesIO(whole), data).parts(SAMPLE_BYTES)
            for user in part.users
        ]
    except (OSError, PlanError, RowError):
        return None
    users = Counter(read)
    if len(head) < version[1] and len(list(groupby(read))) > len(users):
        return None
    length, fraction, items = data.sequence_length, data.validation_fraction, users.values()
    # A user's last items are held out, and the first one is not predicted.
    predicted = [n - 1 - (max(1, round(fraction * n)) if fraction else 0) for n in items]
    filled = [min(length, n - begin) for n in predicted for begin in range(0, n, stride)]
    if not filled:
        return None
    rows = round(len(filled) * version[1] / len(head))
    return _Histories(max(1, rows), sum(filled) / (len(filled) * length))


def _name(plan: Plan) -> str:
    entry, data = catalog.dataset(plan), plan.data
    file = Path(entry.where).expanduser()
    words = (
        "rows", str(file), changed(file), data.max_examples, data.sequence_length, data.stride,
        data.validation, data.validation_fraction, data.held_out,
        data.user_column, data.item_column, data.time_column,
    )  # fmt: skip
    return hashlib.sha256(repr(words).encode()).hexdigest()
