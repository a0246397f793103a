"""The share of a step that waits for data, in short runs of every preset with its own data.

    python tests/bench/waiting.py [--steps 60] [--backend torch] [--preset stories]

Each run reads data that `memconsole data make` wrote. The first steps, in which the first shuffle window
is filled, count too. Results go to results/waiting.json and into docs/data.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.trained import BACKENDS, into_page, machine, markdown, trained

RESULTS = Path(__file__).with_name("results") / "waiting.json"
PAGE = ROOT / "docs" / "data.md"
MADE = {
    "lqr": ("lqr", "lqr.h5", "20k"),
    "gearhead-small": ("equipment", "equipment.jsonl", "5k"),
    "efficientids": ("ratings", "ratings", "20k"),
    "stories": ("text", "stories.txt", "8m"),
}
"""For each preset what `memconsole data make` makes, its name, and its size."""
BAR = 0.02
"""Most of a step that may wait for data."""


def made(preset: str, folder: Path) -> Path:
    """The data of a preset."""
    kind, name, size = MADE[preset]
    path = folder / name
    if not path.exists():
        words = ["data", "make", kind, str(path), "--size", size]
        subprocess.run([sys.executable, "-m", "memconsole", *words], check=True, stdout=sys.stderr)
    return path / "ratings.dat" if path.is_dir() else path


def waited(preset: str, backend: str, steps: int, folder: Path) -> dict[str, float]:
    """Seconds of the run's steps, and those of them that waited."""
    from memconsole.plan import catalog
    from memconsole.plan.plan import SETTINGS, Plan, get
    from memconsole.runs.record.log import events
    from memconsole.runs.record.log.eventreader import EventReader

    plan = catalog.presets()[preset].plan
    settings = {k: get(plan, k) for k in SETTINGS if get(plan, k) != get(Plan(), k)}
    settings |= {
        "backend": backend,
        "device.name": "cpu",
        "data.source": str(made(preset, folder)),
        "train.max_steps": steps,
        "train.log_every": 5,
        "data.validation_fraction": 0.0,  # no evaluation
        "train.answered_records": 0,
        "train.preflight": False,
    }
    with tempfile.TemporaryDirectory(dir=folder) as name:
        state = Path(name)
        environment = {"XDG_CACHE_HOME": str(state / "cache")}
        trained(settings, state, environment)
        (attempt,) = state.glob("memconsole/runs/*/attempts/*")
        found = [e for e in EventReader(attempt).read() if isinstance(e, events.Step)]
    # The first event is that of the first step, which compiles.
    counts = [b.step - a.step for a, b in itertools.pairwise(found)]
    pairs = list(zip(counts, found[1:], strict=True))
    return {
        "step_seconds": sum(n * e.step_seconds for n, e in pairs),
        "waited_seconds": sum(n * e.data_wait_seconds for n, e in pairs),
        "steps": sum(counts),
    }


def share(one: dict[str, float]) -> float:
    return one["waited_seconds"] / one["step_seconds"]


def table(results: dict[str, Any]) -> str:
    rows = [["preset", *(f"{backend}: waits, of a step" for backend in BACKENDS)]]
    for preset, found in results.items():
        cells = [
            f"{share(found[b]):.2%} of {found[b]['step_seconds'] / found[b]['steps'] * 1000:,.0f} ms"
            if b in found
            else "not measured"
            for b in BACKENDS
        ]
        rows.append([preset, *cells])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--preset", choices=sorted(MADE), action="append")
    given = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for preset in given.preset or MADE:
            for backend in given.backend or BACKENDS:
                one = waited(preset, backend, given.steps, Path(name))
                results.setdefault(preset, {})[backend] = one
                print(preset, backend, f"{share(one):.2%}", one, file=sys.stderr)
    if given.preset or given.backend:
        print(table(results))
        return
    document = {"results": results, "command": "python tests/bench/waiting.py", **machine()}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    into_page(PAGE, "waiting", table(results))
    print(table(results))


if __name__ == "__main__":
    main()
