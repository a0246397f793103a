"""Whether the files of a plan's data can be opened. A run whose data cannot be read is then not made."""

from __future__ import annotations

import os
from pathlib import Path

from memconsole.plan import catalog
from memconsole.plan.catalog.folders import MOST_HEADS, known_folder
from memconsole.plan.data.mixture import sources
from memconsole.plan.plan import Plan, PlanError, printable
from memconsole.regular_file import open_descriptor


def check_readable(plan: Plan) -> None:
    """Open each file of the plan's data, the first ones of a large folder. Raises `PlanError` if one cannot be read."""
    for source in sources(plan):
        entry = catalog.dataset(source)
        if entry.kind != "file":
            continue
        path, files = Path(entry.where), [Path(entry.where)]
        if path.is_dir():
            folder = known_folder(path)
            files = list(folder.files[:MOST_HEADS]) if folder is not None else []
        for file in files:
            try:
                os.close(open_descriptor(file))
            except OSError as error:
                words = f"{file}: cannot be read: {error.strerror}"
                raise PlanError(printable(words), "data.source") from None
