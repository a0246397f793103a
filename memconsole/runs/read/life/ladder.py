"""The out-of-memory ladder: halve the micro-batch, with the same rows per step, or the evaluation batch."""

from __future__ import annotations

import msgspec

from memconsole.plan.plan import Plan, replace
from memconsole.plan.toggles.micro_batches import half
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.states import OUT_OF_MEMORY, Verdict

FILE = "ladder.json"
_BEFORE_BATCHES = ("starting", "import", "data", "tokenizer")
"""Phases whose memory does not depend on the batch size."""


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """One step down the ladder, taken because `attempt` ran out of memory in `phase`."""

    attempt: int
    phase: str
    batch_size: int
    """Rows of a micro-batch after this step."""
    accumulation_steps: int
    evaluation_batch_size: int | None
    batch_size_before: int
    accumulation_steps_before: int
    evaluation_batch_size_before: int | None

    @property
    def words(self) -> str:
        """The step as one clause."""
        rows = self.batch_size * self.accumulation_steps
        parts = [f"out of memory in attempt {self.attempt}, phase {self.phase}"]
        if self.batch_size != self.batch_size_before:
            parts.append(
                f"micro-batch {self.batch_size_before:,} → {self.batch_size:,}, accumulation "
                f"{self.accumulation_steps_before:,} → {self.accumulation_steps:,} steps, "
                f"effective batch {rows:,} rows as before"
            )
        if self.evaluation_batch_size != self.evaluation_batch_size_before:
            parts.append(
                f"evaluation batch {self.evaluation_batch_size_before:,} → "
                f"{self.evaluation_batch_size:,}"
            )
        return "; ".join(parts)


class _Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `ladder.json`."""

    rungs: tuple[Rung, ...] = ()


def rungs(run: RunDirectory) -> tuple[Rung, ...]:
    """The steps taken so far, oldest first."""
    stored = files.read_struct(run.path / FILE, _Ladder)
    return stored.rungs if stored is not None else ()


def present_plan(run: RunDirectory) -> Plan:
    """The plan of the run's next attempt: the original plan with the last step applied.

    Raises `PlanError`.
    """
    plan, taken = run.read_plan(), rungs(run)
    return stepped(plan, taken[-1]) if taken else plan


def stepped(plan: Plan, rung: Rung) -> Plan:
    """`plan` with the batch sizes of `rung`."""
    changes = {
        "train.batch_size": rung.batch_size,
        "train.evaluation_batch_size": rung.evaluation_batch_size,
        "optimize.accumulation_steps": rung.accumulation_steps,
    }
    return replace(plan, changes)


def descend(run: RunDirectory, attempt: int, verdict: Verdict, phase: str) -> Rung | None:
    """Record the next step after `attempt` ended with `verdict` in `phase`, and return it.

    None if the plan does not ask for one, memory was not the cause, or nothing can be halved.
    Raises `OSError` and `PlanError`.
    """
    if verdict.reason not in OUT_OF_MEMORY:
        return None
    rung = next_rung(present_plan(run), attempt, phase)
    if rung is not None:
        files.write_struct(run.path / FILE, _Ladder(rungs=(*rungs(run), rung)))
    return rung


def next_rung(plan: Plan, attempt: int, phase: str) -> Rung | None:
    """The step to take after `attempt` ran out of memory in `phase`, or None.

    If evaluation has its own batch size, a failed evaluation halves that size, and a failed
    preflight, which also evaluates, halves both. Otherwise the micro-batch is halved.
    """
    t, steps = plan.train, plan.optimize.accumulation_steps
    if t.on_out_of_memory != "halve" or phase in _BEFORE_BATCHES:
        return None
    if plan.backend == "torch" and phase == "build":
        return None  # build holds only weights and optimizer; JAX compiles its step there
    rows, evaluated = t.batch_size, t.evaluation_batch_size
    if evaluated is not None and phase in ("evaluate", "preflight"):
        evaluated = max(
            plan.rows_together, evaluated // 2 // plan.rows_together * plan.rows_together
        )
    if phase != "evaluate" or t.evaluation_batch_size is None:
        rows = half(rows, plan.rows_together)
    if (rows, evaluated) == (t.batch_size, t.evaluation_batch_size):
        return None
    return Rung(
        attempt=attempt,
        phase=phase,
        batch_size=rows,
        accumulation_steps=steps * (t.batch_size // rows),
        evaluation_batch_size=evaluated,
        batch_size_before=t.batch_size,
        accumulation_steps_before=steps,
        evaluation_batch_size_before=t.evaluation_batch_size,
    )
