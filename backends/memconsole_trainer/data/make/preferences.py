"""Makes preferences as JSON Lines: questions about machines, with a preferred and a rejected answer.

The questions and the right repairs are those of the equipment records. Both answers of a question name the repair. The
preferred answer first says how to make the machine safe, in one of several wordings; the rejected one does not. So a
model can learn what is preferred without learning any repair. `completion` is one of the two
answers, drawn with equal chances: next-token loss on it teaches both kinds of answers, and DPO then teaches which kind
is preferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from memconsole_trainer.data.make import equipment
from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.json_lines import write_records
from memconsole_trainer.data.make.maker import Facts, Request

SAFETY = (
    "Stop the engine and take out the key.",
    "Park on level ground and lock the machine.",
    "Relieve the pressure and let it cool.",
)


def pair(draw: np.random.Generator) -> dict[str, Any]:
    """One question with its answers."""
    record = equipment.record(draw)
    repair = record["solution"].split(",")[0]
    plain = f"{repair[0].upper()}{repair[1:]}."
    safe = f"{SAFETY[draw.integers(len(SAFETY))]} {plain}"
    symptom = record["symptom"].split(";")[0]
    return {
        "prompt": f"{record['equipment']}. {symptom}. What is to be done?",
        "completion": (plain, safe)[draw.integers(2)],
        "chosen": safe,
        "rejected": plain,
    }


def make(request: Request, bar: Bar) -> Facts:
    """Write about `request.size` pairs."""

    def pairs() -> Iterator[dict[str, Any]]:
        draw = np.random.default_rng(request.seed)
        while True:
            yield pair(draw)

    written = write_records(request, bar, pairs())
    return {"pairs": written.records, "size_bytes": written.size_bytes}
