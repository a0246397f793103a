"""How long a key press takes until every delta is there: a random walk over toggles of real catalog models.

    python tests/accuracy/key_press.py [--presses N]

Each press changes one toggle and prices the plan and every other value of every toggle, as the console does
before it draws. Every so often another model, backend and device are picked, which is a row of its own:
nothing is known of them yet. Between presses the console prepares the next one, in what a key rests beyond the
time after which it begins: at most `PREPARING_SECONDS` here, less where it is done sooner. A row of its own is the
same walk by keys pressed without a pause. Processes of their own, in which no framework may be imported.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.devices.budget import budget
from memconsole.memory.estimate import estimate
from memconsole.memory.tracers.ahead import prepared
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from tests.accuracy.results import Latency, Part, write

PRESSES = 3000
PREPARING_SECONDS = 0.15
"""A key every quarter of a second, as the console begins after a tenth (`plan_ahead.AHEAD_SECONDS`)."""
PRESSES_PER_PICK = 60
LIMIT_SECONDS = 0.016
PICK_LIMIT_SECONDS = 0.1
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "numpy", "transformers")


def walk(
    presses: int, seed: int = 1, *, preparing: float = PREPARING_SECONDS
) -> tuple[list[float], list[float]]:
    """Seconds of each of `presses` key presses, and of each pick; `preparing`: seconds at most between two."""
    rng = random.Random(seed)
    plan = Plan()
    pressed: list[float] = []
    picked: list[float] = []
    estimate(plan, budget(plan, None))
    gc.freeze()  # as the console does once it has started
    while len(pressed) < presses:
        picking = len(pressed) >= PRESSES_PER_PICK * len(picked)
        try:
            changed = _pick(plan, rng) if picking else _press(plan, rng)
            check(changed)
            device = budget(changed, None)
        except PlanError:
            continue
        plan = changed
        start = time.perf_counter()
        estimate(plan, device)
        (picked if picking else pressed).append(time.perf_counter() - start)
        _rest(plan, device, preparing)
    return pressed, picked


def _rest(plan: Plan, device: Budget, seconds: float) -> None:
    end = time.perf_counter() + seconds
    if seconds > 0:
        for _ in prepared(plan, device):
            if time.perf_counter() > end:
                return


def _pick(plan: Plan, rng: random.Random) -> Plan:
    return replace(
        plan,
        {
            "model.name": rng.choice(
                [n for n, e in catalog.models().items() if e.task == "language"]
            ),
            "model.target_params": None,
            "backend": rng.choice(("torch", "jax")),
            "device.name": rng.choice(["auto", *catalog.devices()]),
        },
    )


def _press(plan: Plan, rng: random.Random) -> Plan:
    row = rng.choice(OPTIMIZATIONS)
    return row.apply(plan, row.next_value(plan))


def latency(estimate: str, seconds: list[float], limit: float) -> Latency:
    seconds = sorted(seconds)
    return Latency(
        estimate=estimate,
        truth="wall time, no framework imported",
        count=len(seconds),
        median_seconds=seconds[len(seconds) // 2],
        p99_seconds=seconds[int(0.99 * len(seconds))],
        worst_seconds=seconds[-1],
        limit_seconds=limit,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presses", type=int, default=PRESSES)
    parser.add_argument(
        "--held", action="store_true", help="print the seconds of keys pressed without a pause"
    )
    options = parser.parse_args()
    if options.held:
        pressed, _ = walk(options.presses, preparing=0)
        print(json.dumps(pressed))
        return
    pressed, picked = walk(options.presses)
    imported = [name for name in FRAMEWORKS if name in sys.modules]
    if imported:
        sys.exit(f"pricing imported {', '.join(imported)}")
    command = [sys.executable, __file__, "--held", "--presses", str(options.presses)]
    held = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rows = (
        latency("key press → all deltas", pressed, LIMIT_SECONDS),
        latency("key press → all deltas, keys pressed without a pause", held, LIMIT_SECONDS),
        latency("another model, backend and device → all deltas", picked, PICK_LIMIT_SECONDS),
    )
    write(Part(name="key-press", command="python tests/accuracy/key_press.py", rows=rows))


if __name__ == "__main__":
    main()
