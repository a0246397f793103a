"""The out-of-memory ladder: a run that ran out of memory goes on with half the micro-batch and as many rows a step."""

from __future__ import annotations

import msgspec

from memconsole.plan.plan import Plan, replace
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.states import OUT_OF_MEMORY, Verdict

FILE = "ladder.json"
_BEFORE_BATCHES = ("starting", "import", "data", "tokenizer")
"""Phases that hold nothing in proportion to a batch."""


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """One step down, taken because `attempt` ran out of memory in `phase`."""

    attempt: int
    phase: str
    batch_size: int
    """Rows of a micro-batch from now on."""
    accumulation_steps: int
    evaluation_batch_size: int | None
    batch_size_before: int
    accumulation_steps_before: int
    evaluation_batch_size_before: int | None

    @property
    def words(self) -> str:
        """The step as one clause for a person."""
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
    """`ladder.json`."""

    rungs: tuple[Rung, ...] = ()


def rungs(run: RunDirectory) -> tuple[Rung, ...]:
    """The steps down taken so far, first to last."""
    stored = files.read_struct(run.path / FILE, _Ladder)
    return stored.rungs if stored is not None else ()


def present_plan(run: RunDirectory) -> Plan:
    """The plan as the run's next attempt trains it: what was picked, stepped down. Raises `PlanError`."""
    plan, taken = run.read_plan(), rungs(run)
    return stepped(plan, taken[-1]) if taken else plan


def stepped(plan: Plan, rung: Rung) -> Plan:
    """`plan` on a rung of its ladder."""
    changes = {
        "train.batch_size": rung.batch_size,
        "train.evaluation_batch_size": rung.evaluation_batch_size,
        "optimize.accumulation_steps": rung.accumulation_steps,
    }
    return replace(plan, changes)


def descend(run: RunDirectory, attempt: int, verdict: Verdict, phase: str) -> Rung | None:
    """Record the next step down of a run whose `attempt` ended so in `phase`; None where the plan asks for none,
    memory was not the cause, or nothing is left to halve. Raises `OSError` and `PlanError`."""
    if verdict.reason not in OUT_OF_MEMORY:
        return None
    rung = next_rung(present_plan(run), attempt, phase)
    if rung is not None:
        files.write_struct(run.path / FILE, _Ladder(rungs=(*rungs(run), rung)))
    return rung


def next_rung(plan: Plan, attempt: int, phase: str) -> Rung | None:
    """The step down after `attempt` ran out of memory in `phase`, or None.

    An evaluation with batches of its own size halves those, anything else the micro-batch; where both ran before
    the first step, both.
    """
    t, steps = plan.train, plan.optimize.accumulation_steps
    if t.on_out_of_memory != "halve" or phase in _BEFORE_BATCHES:
        return None
    if plan.backend == "torch" and phase == "build":
        return None  # weights and optimizer alone; JAX compiles its step there
    rows, evaluated = t.batch_size, t.evaluation_batch_size
    if evaluated is not None and phase in ("evaluate", "preflight"):
        evaluated = max(1, evaluated // 2)
    if phase != "evaluate" or t.evaluation_batch_size is None:
        rows = half(rows)
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


def half(rows: int) -> int:
    """The most rows, at most half as many, that `rows` is a multiple of: the effective batch stays what it was."""
    return next((n for n in range(rows // 2, 0, -1) if rows % n == 0), rows)
