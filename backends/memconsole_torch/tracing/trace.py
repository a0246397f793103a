"""The tracer process of the torch backend: reads questions on standard input, writes exact memory to standard output.

    python -m memconsole_torch.tracing.trace

Reads `TracerQuestion` and writes `TracerAnswer` records, a line of JSON each, until standard input closes. A new urgent
question ends the trace of a neighbour and drops the neighbours that wait.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from memconsole.memory.coefficients import runtime
from memconsole.memory.exact import affine, allocator
from memconsole.memory.exact.timeline import AffineTimeline, Exact, TracerAnswer, TracerQuestion
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.plan_file import loads
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole_torch.tracing import trace_step
from memconsole_torch.tracing.trace_liveness import Liveness
from memconsole_torch.tracing.trace_sizes import (
    AmbiguousSizeError,
    Coefficient,
    DistinctSizes,
    distinct_sizes,
    evaluating,
    has_table_of_positions,
)
from memconsole_torch.tracing.trace_timeline import coefficients, moments
from memconsole_trainer import tracing

KINDS = ("cpu", "gpu", "rocm", "apple")
_CAVEATS = {
    "cpu": "",
    "gpu": "stand-ins replaced CUDA's kernels; their workspaces are those of PyTorch's sources",
    "rocm": "ROCm's kernels are assumed to allocate as CUDA's do",
    "apple": "MPS was traced by PyTorch's operators: what its graphs allocate inside is not seen",
}
_COLLECTIVES = "buffers of the library that connects the devices are not counted"
MOST_RECORDINGS = 32
"""Number of structures whose traces are cached."""


@dataclass
class TracedStep:
    """The trace of one structure: its timeline, and the events for the allocator's replay."""

    timeline: AffineTimeline
    events: list[int]
    """As in `Liveness.events`, without the phases."""
    sizes: list[Coefficient]
    """The bytes of each storage."""
    phases: list[str]
    """The phase in which each storage was allocated."""


class Tracer:
    """Answers questions and caches its traces."""

    def __init__(self) -> None:
        self._recordings: dict[tuple[str, tuple[int, int] | None], TracedStep] = {}

    def answer(
        self, question: TracerQuestion, interrupt: Callable[[], None] | None = None
    ) -> TracerAnswer:
        """The exact memory of the question's plan, or why there is none. Exceptions of `interrupt` propagate."""
        started = time.monotonic()
        try:
            if question.kind not in KINDS:
                raise PlanError(
                    f'kind "{question.kind}": the torch backend traces {" | ".join(KINDS)}'
                )
            plan = loads(question.plan)
            check(plan)
            check_trainable(plan)
            model = catalog.model(plan)
            recording = self.recording(plan, model, question.kind, interrupt)
            exact = _exact(recording, plan, question, interrupt)
        except PlanError as error:
            return TracerAnswer(id=question.id, problem=str(error))
        seconds = time.monotonic() - started
        timeline = recording.timeline
        if exact.reserved_bytes is not None:
            peak = max(phase.total_bytes for phase in exact.phases.values())
            timeline = msgspec.structs.replace(timeline, reserved_share=exact.reserved_bytes / peak)
        return TracerAnswer(
            id=question.id,
            exact=msgspec.structs.replace(exact, seconds=seconds),
            timeline=timeline,
        )

    def recording(
        self,
        plan: Plan,
        model: Model,
        kind: str,
        interrupt: Callable[[], None] | None = None,
    ) -> TracedStep:
        """The trace of the plan's structure. If sizes cannot be distinguished, it is taken at the plan's own sizes."""
        key = affine.structure_key(plan, model, kind)
        own = (plan.train.batch_size, plan.data.sequence_length)
        for only in (None, own):
            if (key, only) in self._recordings:
                return self._recordings[key, only]
        made = record(plan, model, kind, interrupt)
        self._recordings[key, made.timeline.only] = made
        if len(self._recordings) > MOST_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        return made


def record(
    plan: Plan,
    model: Model,
    kind: str,
    interrupt: Callable[[], None] | None = None,
    *,
    internal: bool = True,
) -> TracedStep:
    """Trace the plan's structure. `internal`: also count what kernels allocate internally."""
    if has_table_of_positions(model) and plan.data.sequence_length > model.max_positions:
        raise PlanError(f"the model has {model.max_positions} positions")
    sizes = distinct_sizes(plan, model)
    evaluated = distinct_sizes(evaluating(plan), model)
    if sizes is not None and evaluated is not None:
        live = trace_step.trace(
            plan, model, kind, sizes, evaluated, internal=internal, check=interrupt
        )
        try:
            return _recording(plan, model, kind, live, sizes, evaluated)
        except AmbiguousSizeError as error:
            print(f"traced at its own sizes: {error}", file=sys.stderr)
    live = trace_step.trace(plan, model, kind, internal=internal, check=interrupt)
    return _recording(plan, model, kind, live)


def _recording(
    plan: Plan,
    model: Model,
    kind: str,
    live: Liveness,
    sizes: DistinctSizes | None = None,
    evaluated: DistinctSizes | None = None,
) -> TracedStep:
    of_storages = coefficients(live, sizes, evaluated, kind)
    own = (plan.train.batch_size, plan.data.sequence_length)
    timeline = AffineTimeline(
        key=affine.structure_key(plan, model, kind),
        phases=moments(live, of_storages),
        only=None if sizes else own,
        source=f"torch {torch.__version__.partition('+')[0]}, traced",
        caveat=_caveat(plan, kind),
    )
    phases = [storage.phase for storage in live.storages]
    return TracedStep(timeline, _several_steps(live), of_storages, phases)


def _caveat(plan: Plan, kind: str) -> str:
    """What may differ on the real devices."""
    several = kind != "cpu" and plan.device.count > 1
    return "; ".join(filter(None, (_CAVEATS[kind], _COLLECTIVES if several else "")))


def _several_steps(live: Liveness) -> list[int]:
    """The recorded events, with the step repeated once before and once after the evaluation."""
    start, end = live.steps[-1]
    step = [event for event in live.events[start:end] if isinstance(event, int)]
    known = set(step)
    within = {event for event in step if -event in known}
    again = [event for event in step if event in within]
    before = [event for event in live.events[:end] if isinstance(event, int)]
    after = [event for event in live.events[end:] if isinstance(event, int)]
    return [*before, *again, *after, *again]


def _exact(
    recording: TracedStep,
    plan: Plan,
    question: TracerQuestion,
    interrupt: Callable[[], None] | None,
) -> Exact:
    batch, length = plan.train.batch_size, plan.data.sequence_length
    exact = affine.evaluate(recording.timeline, batch, length, plan.evaluation_batch)
    if question.kind not in ("gpu", "rocm"):
        return exact
    if interrupt is not None:
        interrupt()
    values = affine.sizes(batch, length)
    evaluated = affine.sizes(plan.evaluation_batch, length)
    sizes = [
        c.factor * (evaluated if phase == "evaluation" else values)[c.term]
        for c, phase in zip(recording.sizes, recording.phases, strict=True)
    ]
    # The matmul libraries' workspaces come from the same allocator and are never freed.
    sizes.append(runtime("torch", question.kind, question.target).workspace_bytes)
    events = [len(sizes), *recording.events]
    replayed = allocator.replay(events, sizes)
    return msgspec.structs.replace(
        exact,
        reserved_bytes=replayed.reserved_bytes,
        least_bytes=allocator.least_capacity(events, sizes),
    )


def main() -> None:
    """Answer questions on the process's standard streams."""
    torch.set_num_threads(1)
    tracing.run(Tracer().answer)


if __name__ == "__main__":
    main()
