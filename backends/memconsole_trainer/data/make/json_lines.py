"""Writes made records as JSON Lines until the size that was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.maker import Request

TOLD_EVERY = 500
"""Records between two changes of the progress bar."""


class Written(NamedTuple):
    """What is in the file."""

    records: int
    size_bytes: int


def write_records(request: Request, bar: Bar, records: Iterable[dict[str, Any]]) -> Written:
    """Write the first of endless `records` to `request.out`: as many as `request.size` counts, or the fewest
    that have its bytes."""
    wanted = request.size.count or request.size.size_bytes or 0
    number = size = 0
    with open(request.out, "w", encoding="utf-8") as file:
        for number, record in enumerate(records, 1):
            size += file.write(json.dumps(record) + "\n")
            done = number if request.size.count else min(size, wanted)
            if number % TOLD_EVERY == 0 or done >= wanted:
                bar.at(done, wanted)
            if done >= wanted:
                break
    return Written(number, size)
