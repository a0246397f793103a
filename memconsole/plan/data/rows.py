"""How many rows an epoch of windows or histories has: as a run counted them, or guessed from the files."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path

from memconsole import regular_file
from memconsole.plan import catalog
from memconsole.plan.data.counted import keep_count, kept_count
from memconsole.plan.errors import PlanError
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of_model
from memconsole.plan.tasks.recommendation import RATING_FILES

SAMPLE_BYTES = 1 << 18
"""How much of a rating file is read to guess how many rows it gives."""
_USER = re.compile(rb"^(\d+)(?:::|,)", re.MULTILINE)


def counted_rows(plan: Plan) -> int | None:
    """The training rows of `data.source` in its present state, as a run counted them; None if there was none."""
    return kept_count(plan, _file)


def keep_counted_rows(plan: Plan, train_rows: int) -> None:
    """Keep a count. If the cache cannot be written, later plans go on guessing."""
    keep_count(plan, train_rows, _file)


def training_rows(plan: Plan, model: Model) -> int | None:
    """Rows of one epoch of a task that does not read text; guessed from the size of the files until a run has counted
    them, None where that is unknown too."""
    found = counted_rows(plan)
    if found is not None:
        return found
    try:
        entry = catalog.dataset(plan)
    except PlanError:
        return None
    if entry.bytes is None or entry.kind != "file":
        return None
    share = 1.0 - plan.data.validation_fraction
    if isinstance(model, Recommender):
        rows = _rating_rows(_paths(Path(entry.where).expanduser()), plan.stride)
        return None if rows is None else max(1, rows)
    row = sum(array.row_bytes for array in task_of_model(model).inputs(plan, model))
    rows = entry.bytes // row
    most = plan.data.max_examples
    return max(1, int((rows if most is None else min(rows, most)) * share))


@lru_cache(maxsize=64)
def _rating_rows(files: tuple[tuple[Path, int, int], ...], stride: int) -> int | None:
    """Rows of the histories in rating files (path, modification time, bytes), from the users of their first lines. The
    files are taken to be sorted by user."""
    rows = 0.0
    for path, _, size in files:
        try:
            with regular_file.open_regular(path) as file:
                head = file.read(SAMPLE_BYTES)
        except (OSError, PlanError):
            return None
        users = _USER.findall(head)
        if not users:
            return None
        lengths: dict[bytes, int] = {}
        for user in users:
            lengths[user] = lengths.get(user, 0) + 1
        rows += sum(-(-n // stride) for n in lengths.values()) * size / len(head)
    return round(rows)


def _paths(where: Path) -> tuple[tuple[Path, int, int], ...]:
    """The files of a source, each with its modification time in ns and its bytes."""
    if where.is_dir():
        found = [p for p in sorted(where.glob("ratings.*")) if p.suffix in RATING_FILES]
    else:
        found = [where]
    changed = []
    for path in found:
        try:
            told = path.stat()
        except OSError:
            continue
        changed.append((path, told.st_mtime_ns, told.st_size))
    return tuple(changed)


def _file(plan: Plan) -> str:
    entry, data = catalog.dataset(plan), plan.data
    words = (
        "rows", _paths(Path(entry.where).expanduser()), data.max_examples, data.sequence_length, data.stride,
        data.validation, data.validation_fraction, data.held_out,
    )  # fmt: skip
    return hashlib.sha256(repr(words).encode()).hexdigest()
