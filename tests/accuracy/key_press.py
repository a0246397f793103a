"""How long a key press takes until every delta is there: a random walk over toggles of real catalog models.

    python tests/accuracy/key_press.py [--presses N]

Each press changes one toggle, or now and then the model, the backend or the device, and prices the plan and
every other value of every toggle, as the console does before it draws. A process of its own, in which
no framework may be imported.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.devices.budget import budget  # noqa: E402
from memconsole.memory.estimate import estimate  # noqa: E402
from memconsole.plan import catalog  # noqa: E402
from memconsole.plan.check import check  # noqa: E402
from memconsole.plan.optimizations import OPTIMIZATIONS  # noqa: E402
from memconsole.plan.plan import Plan, PlanError, replace  # noqa: E402
from tests.accuracy.results import Latency, Part, write  # noqa: E402

PRESSES = 2000
LIMIT_SECONDS = 0.016
OTHER_SHARE = 0.08
"""Presses that pick another model, backend or device."""
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "numpy", "transformers")


def walk(presses: int, seed: int = 1) -> list[float]:
    """Seconds of each of `presses` key presses, from an empty memory on."""
    rng = random.Random(seed)
    plan, seconds = Plan(), []
    while len(seconds) < presses:
        try:
            changed = _press(plan, rng)
            check(changed)
            device = budget(changed, None)
        except PlanError:
            continue
        plan = changed
        start = time.perf_counter()
        estimate(plan, device)
        seconds.append(time.perf_counter() - start)
    return seconds


def _press(plan: Plan, rng: random.Random) -> Plan:
    if rng.random() < OTHER_SHARE:
        key = rng.choice(("model.name", "backend", "device.name"))
        found = {
            "model.name": list(catalog.models()),
            "backend": ["torch", "jax"],
            "device.name": ["auto", *catalog.devices()],
        }[key]
        changes = {key: rng.choice(found)}
        if key == "model.name":
            changes["model.target_params"] = None
        return replace(plan, changes)
    row = rng.choice(OPTIMIZATIONS)
    return row.apply(plan, row.next_value(plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presses", type=int, default=PRESSES)
    options = parser.parse_args()
    seconds = sorted(walk(options.presses))
    imported = [name for name in FRAMEWORKS if name in sys.modules]
    if imported:
        sys.exit(f"pricing imported {', '.join(imported)}")
    row = Latency(
        estimate="key press → all deltas",
        truth="wall time, no framework imported",
        count=len(seconds),
        median_seconds=seconds[len(seconds) // 2],
        p99_seconds=seconds[int(0.99 * len(seconds))],
        worst_seconds=seconds[-1],
        limit_seconds=LIMIT_SECONDS,
    )
    command = "python tests/accuracy/key_press.py"
    write(Part(name="key-press", command=command, rows=(row,)))


if __name__ == "__main__":
    main()
