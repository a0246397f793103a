"""What a recommender through Gemma 2B takes on a TPU, with one optimization after another.

    python tests/accuracy/recommender.py             formulas
    python tests/accuracy/recommender.py compile     and what XLA plans for the step; needs `pip install "memconsole[tpu]"`

Compiling takes a minute or more a row, so answers are kept in results/recommender.json. No TPU is needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.devices.budget import budget
from memconsole.memory.formula import memory_table
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, replace
from memconsole.units import format_bytes

RESULTS = Path(__file__).with_name("results") / "recommender.json"
PLAIN: dict[str, Any] = {
    "train.batch_size": 16,
    "optimize.precision": "fp32",
    "optimize.gradient_checkpointing": "none",
    "optimize.accumulation_steps": 1,
    "optimize.freeze_base": False,
}
"""The preset without its optimizations."""
ADDED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none: batch 16, fp32, all trained", {}),
    ("frozen decoder", {"optimize.freeze_base": True}),
    ("gradient checkpointing per block", {"optimize.gradient_checkpointing": "full"}),
    ("bf16", {"optimize.precision": "bf16"}),
    ("batch 2, 8 accumulated", {"train.batch_size": 2, "optimize.accumulation_steps": 8}),
    ("decoder in int8", {"optimize.base_storage": "int8"}),
    ("decoder in nf4", {"optimize.base_storage": "nf4"}),
)


def plans() -> list[tuple[str, Plan]]:
    """Each row's name and plan. Each adds its settings to those before it."""
    plan = replace(catalog.preset("efficientids-gemma"), PLAIN)
    found = []
    for name, settings in ADDED:
        plan = replace(plan, settings)
        found.append((name, plan))
    return found


def compiled(plan: Plan) -> dict[str, Any]:
    """What XLA plans for one step."""
    from memconsole_jax.tracing import trace_targets
    from tests.training.harness.planned_step import planned_step

    trace_targets.prepare_environment()
    place = trace_targets.target(plan.device.name, "tpu")
    step = planned_step(plan, catalog.model(plan), place)
    return {"bytes": step.needed, "refused": step.refused, "compiler": place.compiler}


def main() -> None:
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, plan in reversed(plans()) if sys.argv[1:] == ["compile"] else ():
        if name not in known:
            known[name] = compiled(plan)
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    print("| added | weights | gradients, state | formula's peak | XLA's peak |")
    print("|---|---|---|---|---|")
    for name, plan in plans():
        table = memory_table(plan, catalog.model(plan), budget(plan, None))
        part = {c.name: max(c.phases.values(), default=0) for c in table.components}
        trained = part["gradients"] + part["optimizer state"]
        answer = known.get(name)
        words = "" if answer is None else format_bytes(answer["bytes"])
        words += ", refused" if answer and answer["refused"] else ""
        row = [name, *map(format_bytes, (part["weights"], trained, table.peak_bytes)), words]
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
