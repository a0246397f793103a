"""Seconds from the command to the first step of a plan, by what the trainer says it does.

    python tests/bench/starting.py [--backend torch] [--rounds 5] [--set model.name=gpt2]...

Each round starts a run of one step with the caches of the rounds before it; the first round has none. Shown are the
first round and the least of the others. The plan is the default one with the given settings.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventreader import EventReader
from tests.bench.trained import BACKENDS, trained

BEFORE = "command and supervisor"


def started(settings: dict[str, str], folder: Path, number: int) -> dict[str, float]:
    """Seconds of each phase of one run until its first step."""
    state = folder / str(number)
    began = time.time()
    trained(settings, state, {"XDG_CACHE_HOME": str(folder / "cache")})
    (attempt,) = state.glob("memconsole/runs/*/attempts/*")
    marks = [(BEFORE, began)]
    for event in EventReader(attempt).read():
        if isinstance(event, events.Phase):
            part = event.detail.partition(":")[0] if event.phase == "preflight" else ""
            marks.append((f"{event.phase} {part}".strip(), event.time_wall))
        elif isinstance(event, events.Step):
            marks.append(("", event.time_wall))
            break
    found: dict[str, float] = {}
    for (phase, since), (_, until) in itertools.pairwise(marks):
        found[phase] = found.get(phase, 0.0) + until - since
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    arguments = parser.parse_args()
    fixed = {"backend": arguments.backend, "device.name": "cpu", "train.max_steps": "1"}
    settings = fixed | dict(word.split("=", 1) for word in arguments.assignments)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        runs = [started(settings, Path(name), n) for n in range(arguments.rounds)]
    first, later = runs[0], runs[1:] or runs
    least = min(later, key=lambda run: sum(run.values()))
    for phase in first:
        print(f"{phase:26s} {first[phase]:6.2f} {least.get(phase, 0.0):6.2f} s")
    print(f"{'in all':26s} {sum(first.values()):6.2f} {sum(least.values()):6.2f} s")


if __name__ == "__main__":
    main()
