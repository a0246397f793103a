"""Eight steps of the preset `lqr` in JAX: dispatched one by one, against one dispatch of `lax.scan` over them.

    python tests/bench/scanned.py [--rounds 15] [--print]

Both take the trainer's own step, batches of its own data and the environment of its processes. Rounds alternate, and
seconds are the processor's, so that other programs on the machine slow both alike. Results go to results/scanned.json
and into docs/systems.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.plan import catalog
from memconsole.plan.plan import Plan, replace
from memconsole.runs.act.environment import trainer_environment
from tests.bench.inside import engine_and_batches
from tests.bench.trained import into_page, machine, markdown

RESULTS = Path(__file__).with_name("results") / "scanned.json"
PAGE = ROOT / "docs" / "systems.md"
STEPS = 8
BATCHES = (64, 4)
WORTH = 0.05
"""The share of a step's time from which several steps in one dispatch would be worth their code."""


def measured(rows: int, data: Path, rounds: int) -> dict[str, Any]:
    """Processor seconds of a step in each round, both ways, and whether both end with the same weights."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from memconsole_jax.compiled.step import train_step

    plan = plan_of(rows, data)
    engine, batches = engine_and_batches(plan, STEPS)
    arrays = [engine._put_training_batch(batch) for batch in batches]
    stacked = jax.tree.map(lambda *one: jnp.stack(one), *arrays)
    frozen, rates, step = engine._frozen, engine._rates(), engine._train_step
    whole = train_step(plan, catalog.model(plan), engine._programs._update, engine._programs.disk)

    def scan(state: Any, frozen: Any, stacked: Any, rates: Any) -> Any:
        return lax.scan(lambda s, one: whole(s, frozen, one, rates), state, stacked)

    scanned = (
        jax.jit(scan, donate_argnums=0).lower(engine._train_state, frozen, stacked, rates).compile()
    )

    def dispatched(state: Any) -> Any:
        for one in arrays:
            state, _ = step(state, frozen, one, rates)
        return state

    ways: dict[str, Callable[[Any], Any]] = {
        "dispatched": dispatched,
        "scanned": lambda state: scanned(state, frozen, stacked, rates)[0],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    ends = {}
    for number in range(rounds + 1):  # the first round is not counted
        for name, take in ways.items():
            state = jax.block_until_ready(jax.tree.map(jnp.copy, engine._train_state))
            began = time.process_time()
            ends[name] = jax.block_until_ready(take(state))
            if number:
                seconds[name].append((time.process_time() - began) / STEPS)
    weights = [ends[name].weights for name in ways]
    same = all(bool((weights[0][n] == weights[1][n]).all()) for n in weights[0])
    return {"seconds": seconds, "same_bits": same}


def plan_of(rows: int, data: Path) -> Plan:
    changes = {
        "backend": "jax",
        "device.name": "cpu",
        "data.source": str(data),
        "train.batch_size": rows,
    }
    return replace(catalog.preset("lqr"), changes)


def gain(one: Mapping[str, Any]) -> float:
    """The middle share of a step that one dispatch saves, round by round; negative where it costs."""
    pairs = zip(one["seconds"]["dispatched"], one["seconds"]["scanned"], strict=True)
    return statistics.median(1 - scanned / dispatched for dispatched, scanned in pairs)


def table(results: Mapping[str, Any]) -> str:
    """A row for each size of a batch."""
    rows = [["windows in a step", "eight dispatches, ms a step", "one scan", "saved", "same bits"]]
    for name, one in results.items():
        times = (f"{1000 * statistics.median(s):.1f}" for s in one["seconds"].values())
        rows.append(
            [
                name,
                *times,
                f"{gain(one):.1%}".replace("%", " %"),
                "yes" if one["same_bits"] else "no",
            ]
        )
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--print", action="store_true", help="the table of what is stored")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        rows, data = options.one
        print(json.dumps(measured(int(rows), Path(data), options.rounds)))
        return
    if not options.print:
        _measure(options.rounds)
    text = table(json.loads(RESULTS.read_text())["results"])
    print(text)
    into_page(PAGE, "scanned", text)


def _measure(rounds: int) -> None:
    """Each size of a batch in a process of its own."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "lqr.h5"
        made = ["-m", "memconsole", "data", "make", "lqr", str(data), "--size", "10k"]
        subprocess.run([sys.executable, *made], check=True, stdout=sys.stderr)
        for rows in BATCHES:
            own = [__file__, "--rounds", str(rounds), "--one", str(rows), str(data)]
            environment = trainer_environment(plan_of(rows, data), os.environ)
            done = subprocess.run(
                [sys.executable, *own],
                env=environment,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            results[str(rows)] = json.loads(done.stdout.splitlines()[-1])
    document = {"results": results, "command": "python tests/bench/scanned.py", **machine()}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
