"""Fits what a trainer on a CPU holds in addition to its tensors to real runs: workspace, libraries, and the heap."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memconsole.memory import coefficients as numbers
from memconsole.memory.activations.kept import kept_by_blocks
from memconsole.memory.coefficients import Runtime
from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.state.data import data_bytes
from memconsole.memory.state.step_sizes import step_of
from memconsole.memory.table import MemoryTable
from memconsole.plan.plan import Plan, replace
from memconsole.plan.training.compiler import imports_compiler
from tests.accuracy.results import MIB

if TYPE_CHECKING:
    from tests.accuracy.cpu import Outcome

COEFFICIENTS = Path(__file__).resolve().parents[2] / "memconsole" / "memory" / "coefficients.json"
COMMAND = "python tests/accuracy/cpu.py --write"
LEAST_KEPT = 4 * MIB


def fit(backend: str, outcomes: Sequence[Outcome], *, steps: bool = True) -> None:
    """Put the constants that leave least of these runs unexplained into the coefficients file: those of training steps,
    or without `steps` those of saving and compiling.

    Runs whose heap gives freed memory back show the workspace; the others, what the heap keeps.
    """
    document = json.loads(COEFFICIENTS.read_text())
    entry = document["runtime"][backend]["cpu"]
    constants, shares = _outside_steps(backend, outcomes), dict[str, float]()
    if steps:
        constants, shares = _constants(backend, outcomes), _shares(backend, outcomes)
        entry["source"] = f"fitted to {len(outcomes)} real runs by `{COMMAND}`"
    for name, value in constants.items():
        entry[name] = value
        print(f"{backend}: {name} {value / MIB:.1f} MiB")
    for name, share in shares.items():
        entry["heaps"]["fast"][name] = share
        print(f"{backend}: the fast heap keeps {share} ({name})")
    COEFFICIENTS.write_text(json.dumps(document, indent=1) + "\n")


def fit_jemalloc(backend: str, outcomes: Sequence[Outcome]) -> None:
    """Put the share of a step's temporary bytes that jemalloc keeps, in addition to a tight heap's bytes, into the
    coefficients file. It is found by least squares of the relative errors. Beside it: the least and the most that was kept,
    in the runs where the share is more than `LEAST_KEPT` bytes."""
    found = []
    for outcome in outcomes:
        tight = table_of(replace(outcome.plan, {"optimize.heap": "tight"}), outcome.table.budget)
        found.append((_temporary(tight), tight.peak_bytes, outcome.peak.measured_bytes))
    relative = [(size / peak, 1 - tight / peak) for size, tight, peak in found]
    share = sum(size * left for size, left in relative) / sum(size**2 for size, _ in relative)
    kept = [
        (peak - tight) / (share * size) for size, tight, peak in found if share * size > LEAST_KEPT
    ]
    document = json.loads(COEFFICIENTS.read_text())
    heaps = document["runtime"][backend]["cpu"]["heaps"]
    least, most = round(max(0.0, min(kept)), 1), round(max(kept), 1)
    heaps["jemalloc"] = {"step": round(share, 3), "range": [least, most]}
    COEFFICIENTS.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{backend}: jemalloc keeps {share:.3f}, {least} to {most} times that")


def _constants(backend: str, outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Bytes that do not depend on the plan."""
    costs = numbers.runtime(backend, "cpu")
    tight = [o for o in outcomes if o.plan.optimize.heap == "tight"]

    def unexplained(runs: Sequence[Outcome]) -> int:
        return int(statistics.median(o.peak.measured_bytes - o.peak.estimated_bytes for o in runs))

    found = {"workspace_bytes": costs.workspace_bytes + unexplained(tight)}
    if backend == "torch":  # XLA on a CPU computes 16-bit types in fp32
        wide = [o for o in tight if o.plan.optimize.precision == "fp32"]
        narrow = [o for o in tight if o.plan.optimize.precision != "fp32"]
        found["workspace_bytes"] = costs.workspace_bytes + unexplained(wide)
        more = unexplained(narrow) - unexplained(wide)
        found["kernels_16_bytes"] = costs.kernels_16_bytes + more
    training = [o for o in outcomes if not _compiler_sets(o, costs)]
    beside = (_above_idle(o, costs) - _tensors(o) for o in training)
    found["host_bytes"] = costs.host_bytes + int(statistics.median(beside))
    return found


def _outside_steps(backend: str, outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Bytes that do not depend on the plan, of phases that are no part of a training step."""
    costs = numbers.runtime(backend, "cpu")

    def left(o: Outcome) -> int:
        kernels = costs.kernels_16_bytes if o.plan.optimize.precision != "fp32" else 0
        found = o.by_phase["checkpoint"] - _stored(o.table, "checkpoint") - kernels
        print(f"{backend}: saving takes {found / MIB:.1f} MiB in addition to its tensors")
        return found

    found = {"settled_bytes": max(0, int(statistics.median(map(left, outcomes))))}
    if compiled := [o for o in outcomes if _compiler_sets(o, costs)]:
        taken = statistics.median(_above_idle(o, costs) for o in compiled)
        found["compiling_bytes"] = int(taken)
    return found


def _compiler_sets(outcome: Outcome, costs: Runtime) -> bool:
    """Whether XLA's compiler took more of the host's memory than the training after it."""
    return outcome.plan.backend == "jax" and _above_idle(outcome, costs) > 1.1 * _tensors(outcome)


def _above_idle(outcome: Outcome, costs: Runtime) -> int:
    """Measured host bytes of a run in addition to those of an idle trainer."""
    imported = costs.compiler_import_bytes if imports_compiler(outcome.plan) else 0
    return outcome.host.measured_bytes - costs.host_bytes - imported


def _tensors(outcome: Outcome) -> int:
    """Measured host bytes of a run's model, and those of its data."""
    return outcome.peak.measured_bytes + data_bytes(outcome.plan, outcome.plan.data.vocab_size or 0)


def _stored(table: MemoryTable, phase: str) -> int:
    """Estimated bytes of a phase, without the framework's own."""
    return sum(c.at(phase) for c in table.components if c.name != "runtime")


def _shares(backend: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The shares of `Heap` by least squares of the relative errors of the fast runs. That of logits stays as it is. None
    where the heap keeps nothing: XLA's block is no part of it."""
    costs = numbers.runtime(backend, "cpu").heaps.get("fast")
    if costs is None:
        return {}
    sums: dict[str, tuple[float, float]] = {}
    for outcome in (o for o in outcomes if o.plan.optimize.heap == "fast"):
        tight = table_of(replace(outcome.plan, {"optimize.heap": "tight"}), outcome.table.budget)
        measured = outcome.peak.measured_bytes
        left = measured - tight.peak_bytes - costs.logits * _most(tight, "logits and loss")
        name, size = _allocated(outcome.plan, tight)
        top, below = sums.get(name, (0.0, 0.0))
        sums[name] = top + size * left / measured**2, below + size**2 / measured**2
    return {name: round(max(0.0, top / below), 3) for name, (top, below) in sums.items()}


def _allocated(plan: Plan, tight: MemoryTable) -> tuple[str, int]:
    """The name of the share that a plan tells, and the bytes that it is a share of."""
    if plan.backend == "jax":
        return "step", _temporary(tight)
    model = model_of(plan)
    step = step_of(plan, model, "cpu")
    blocks = kept_by_blocks(plan, model, step.flow, "none", "cpu") * step.tokens
    return ("activations_frozen" if step.frozen_blocks else "activations"), blocks


def _temporary(tight: MemoryTable) -> int:
    """Bytes at the peak that a step allocates and frees."""
    lasting = ("weights", "optimizer state", "runtime")
    return sum(c.at(tight.peak_phase) for c in tight.components if c.name not in lasting)


def _most(table: MemoryTable, name: str) -> int:
    rows: list[Any] = [c for c in table.components if c.name == name]
    return max((row.at(phase) for row in rows for phase in table.phases), default=0)
