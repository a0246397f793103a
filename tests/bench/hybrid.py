"""What hybrid training gains: its validation loss beside that of plain training, of steps left out, and of larger rates.

    python tests/bench/hybrid.py [--only small|default|10m|default-jax] [--seeds N] [--steps N] [--short]
    python tests/bench/hybrid.py --memory    measures the memory of the phases alone
    python tests/bench/hybrid.py --print     measures nothing, prints what is stored

`--short` leaves out two variants: steps left out, and the larger rate.

Every variant trains in this process, with torch on one thread, so that seconds of CPU time compare on a busy machine
too. With JAX they would count compilers' time, so that its runs are compared at equal steps alone. The memory of each
phase is that of one more run of the hybrid plan, launched as a person launches it. Results go to results/hybrid.json
and their tables into docs/hybrid.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.plan.sections.hybrid import PHASES
from tests.bench.trained import into_page, machine, markdown, run

RESULTS = Path(__file__).with_name("results") / "hybrid.json"
PAGE = ROOT / "docs" / "hybrid.md"
MIB = 2**20
COMMON = {
    "data.source": "python-stdlib",
    "data.max_examples": 25,
    "train.learning_rate": 2e-3,
    "train.warmup_steps": 40,
    "device.name": "cpu",
    "train.sample_tokens": 0,
}
SMALL = {"model.target_params": 300_000, "data.vocab_size": 1024, "data.sequence_length": 64}
MODELS: dict[str, dict[str, Any]] = {
    "small": {**COMMON, **SMALL},
    "default": {**COMMON, "model.target_params": 1_000_000},
    "10m": {**COMMON, "model.target_params": 10_000_000},
    "default-jax": {**COMMON, "model.target_params": 1_000_000, "backend": "jax"},
}
STEPS = {"small": 150, "default": 150, "10m": 120, "default-jax": 150}
HYBRID = {"hybrid.mode": "balanced", "hybrid.warmup_steps": 40, "hybrid.predict_precision": "same"}
WITHOUT_GRADIENTS = ("hybrid", "steps left out")
"""Variants with steps that compute no gradient."""


def held(name: str, steps: int) -> dict[str, dict[str, int]]:
    """Bytes of each phase of one hybrid run, estimated and measured. `hybrid.memory` is compress, so that most of the
    optimizer state leaves in predict phases."""
    settings = {**MODELS[name], **HYBRID, "hybrid.memory": "compress"}
    rows = run({**settings, "train.max_steps": steps})["memory"]["comparison"]
    return {
        row["name"]: {"estimated": row["estimated_bytes"], "measured": row["measured_bytes"]}
        for row in rows
        if row["name"] in PHASES and row["measured_bytes"]
    }


def table(found: Mapping[str, Any]) -> str:
    """What was trained, as the page shows it."""
    rows = [
        [
            "model",
            "variant",
            "validation loss",
            "gradient steps",
            "without gradients",
            "CPU seconds",
        ]
    ]
    lines = []
    for name, result in found["models"].items():
        for variant, v in result["variants"].items():
            loss = f"{v['mean']:.4f} ± {v['deviation']:.4f}"
            seconds = f"{v['cpu_seconds']:.1f}" if v["cpu_seconds"] else "–"
            steps = v["gradient_steps"]
            saved = f"{result['steps'] - steps:.1f}" if variant in WITHOUT_GRADIENTS else "–"
            rows.append([name, variant, loss, f"{steps:.0f}", saved, seconds])
        j = result["jumps"]
        line = f"- {name}, {result['steps']} steps, {result['seeds']} seeds: {j['tried']} jumps tried, {j['kept']} kept"
        if j["kept"]:
            line += (
                f"; {j['kept_and_better']} of these lowered the loss of other held-out rows, by {j['mean_decrease']:.4f} "
                f"nats on average over all that were kept, at worst {j['worst'][0]:+.4f} ± {j['worst'][1]:.4f} "
                f"(the standard error); {j['worse_than_noise']} raised it by more than two standard errors"
            )
        lines.append(line)
    return "\n".join([markdown(rows, 2), "", *lines])


def memory_table(found: Mapping[str, Any]) -> str:
    """What each phase was estimated to hold and held, in MiB."""
    rows = [["model", *PHASES]]
    for name, result in found["models"].items():
        held = result.get("held", {})
        cells = [
            f"{held[phase]['estimated'] / MIB:.0f} / {held[phase]['measured'] / MIB:.0f}"
            if phase in held
            else "–"
            for phase in PHASES
        ]
        rows.append([name, *cells])
    return markdown(rows)


TABLES = {"hybrid-bench": table, "hybrid-bench-memory": memory_table}
"""The tables of the page, by their marks."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS, help="measure one model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of a run")
    parser.add_argument("--short", action="store_true", help="leave out two variants")
    parser.add_argument("--memory", action="store_true", help="measure the memory of phases alone")
    parser.add_argument("--print", action="store_true", help="print the stored results")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    if not options.print:
        from tests.bench import hybrid_run

        for name in [options.only] if options.only else MODELS:
            steps = options.steps or STEPS[name]
            result = dict(found["models"].get(name, {}))
            if not options.memory:
                with contextlib.redirect_stdout(io.StringIO()):
                    result = hybrid_run.measured(
                        name, MODELS[name], HYBRID, options.seeds, steps, short=options.short
                    )
            result["held"] = held(name, steps)
            found = {**found, **machine(), "models": {**found["models"], name: result}}
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        for mark, text in TABLES.items():
            into_page(PAGE, mark, text(found))
    print("\n\n".join(text(found) for text in TABLES.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
