"""The sizes of a run's attempts: the out-of-memory ladder, and changes that a person makes.

The ladder halves the micro-batch, with the same rows per step, or the evaluation batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memconsole.plan.plan import Plan, get, replace
from memconsole.plan.toggles.micro_batches import half
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.states import OUT_OF_MEMORY, Verdict

FILE = "ladder.json"
SIZES = (
    "device.count",
    "optimize.sharding",
    "optimize.accumulation_steps",
    "train.batch_size",
    "train.evaluation_batch_size",
)
"""Settings that a resumed run may change and that its memory and the time of its steps depend on."""
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
    resized_after: tuple[int, ...] = ()
    """The attempts after which a person changed one of `SIZES`."""


def rungs(run: RunDirectory) -> tuple[Rung, ...]:
    """The steps taken so far, oldest first."""
    return _ladder(run).rungs


def resized_after(run: RunDirectory) -> frozenset[int]:
    """The attempts whose sizes the next attempt no longer had."""
    ladder = _ladder(run)
    return frozenset(ladder.resized_after) | {rung.attempt for rung in ladder.rungs}


def note_resized(run: RunDirectory, before: Plan, after: Plan) -> None:
    """Record that the next attempt has other sizes, if `before` and `after` differ in them. Raises `OSError`."""
    attempt = run.newest_attempt()
    if attempt is None or all(get(before, key) == get(after, key) for key in SIZES):
        return
    ladder = _ladder(run)
    attempts = tuple(sorted({*ladder.resized_after, attempt}))
    files.write_struct(run.path / FILE, msgspec.structs.replace(ladder, resized_after=attempts))


def least_evaluated(taken: Sequence[Rung]) -> int | None:
    """The rows of an evaluation batch after the steps `taken`; None if none of them halved it."""
    halved = [r for r in taken if r.evaluation_batch_size != r.evaluation_batch_size_before]
    return halved[-1].evaluation_batch_size if halved else None


def _ladder(run: RunDirectory) -> _Ladder:
    return files.read_struct(run.path / FILE, _Ladder) or _Ladder()


def present_plan(run: RunDirectory) -> Plan:
    """The plan of the run's next attempt: its plan with the steps taken. Raises `PlanError`."""
    return stepped(run.read_plan(), rungs(run))


def stepped(plan: Plan, taken: Sequence[Rung]) -> Plan:
    """`plan` after the steps `taken`. An evaluation batch that was not halved, or is smaller by now, stays."""
    if not taken:
        return plan
    changes: dict[str, object] = {
        "train.batch_size": taken[-1].batch_size,
        "optimize.accumulation_steps": taken[-1].accumulation_steps,
    }
    least, planned = least_evaluated(taken), plan.train.evaluation_batch_size
    if least is not None and (planned is None or planned > least):
        changes["train.evaluation_batch_size"] = least
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
        ladder = _ladder(run)
        files.write_struct(
            run.path / FILE, msgspec.structs.replace(ladder, rungs=(*ladder.rungs, rung))
        )
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
