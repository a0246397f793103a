"""Where the time of a torch step goes: products of matrices, attention, the optimizer and all else, by torch's profiler.

    python tests/bench/step_parts.py [--print]

The shapes are those of peers.py. Each is a process of its own in the environment of a trainer, and takes the
trainer's own step. What the products take bounds the speed of any trainer on this processor. Results go to
results/step_parts.json and into docs/speed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.plan.plan import Plan, replace
from memconsole.runs.act.environment import trainer_environment
from tests.bench import peer_runs
from tests.bench.inside import engine_and_batches
from tests.bench.peers import CASES, EXPERTS, PAGE, Case
from tests.bench.trained import into_page, machine, markdown

RESULTS = Path(__file__).with_name("results") / "step_parts.json"
MEASURED = tuple(case for case in CASES if case.parts == 1 and case.shape is not EXPERTS)
SETTLING = 2
"""First steps that are not counted."""
COUNTED = {"GPT 0.8 M, 12 x 64 (nanoGPT's README run for a CPU)": 60}
"""Steps that are, where they are short; otherwise three."""
PARTS = {
    "products": ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"),
    "attention": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "optimizer": ("aten::_fused_adamw_", "aten::linalg_vector_norm"),
}
"""Operations by name; what is in none is `else`."""


def measured(plan: Plan, steps: int) -> dict[str, float]:
    """Seconds of each part in one step."""
    import torch

    engine, batches = engine_and_batches(plan, SETTLING + steps)
    for batch in batches[:SETTLING]:
        engine.train_step(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for batch in batches[SETTLING:]:
            engine.train_step(batch)
    found = dict.fromkeys([*PARTS, "else"], 0.0)
    for operation in profile.key_averages():
        part = next((name for name, keys in PARTS.items() if operation.key in keys), "else")
        found[part] += operation.self_cpu_time_total / 1e6 / steps
    return found


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """A row for each shape: the shares of a step's time."""
    rows = [["work", "ms a step", *PARTS, "all else"]]
    for name, parts in results.items():
        whole = sum(parts.values())
        shares = (f"{seconds / whole:.0%}".replace("%", " %") for seconds in parts.values())
        rows.append([name, f"{1000 * whole:,.0f}", *shares])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="the table of what is stored")
    parser.add_argument("--one", nargs=2, metavar=("CHANGES", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        changes, steps = options.one
        print(json.dumps(measured(replace(Plan(), json.loads(changes)), int(steps))))
        return
    if not options.print:
        found = {case.name: _measure(case) for case in MEASURED}
        command = "python tests/bench/step_parts.py"
        document = {"command": command, **machine(), "results": found}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    text = table(json.loads(RESULTS.read_text())["results"])
    print(text)
    into_page(PAGE, "step-parts", text)


def _measure(case: Case) -> dict[str, float]:
    """One shape, in a process of its own."""
    steps = COUNTED.get(case.name, 3)
    with tempfile.TemporaryDirectory() as folder:
        work = peer_runs.prepare(
            Path(folder), case.shape, case.rows, case.length, SETTLING + steps, case.bf16
        )
        changes = {key: _plain(value) for key, value in peer_runs.settings(work, "torch").items()}
        done = subprocess.run(
            [sys.executable, __file__, "--one", json.dumps(changes), str(steps)],
            env=trainer_environment(replace(Plan(), changes), os.environ),
            stdout=subprocess.PIPE,
            check=True,
        )
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    main()
