"""The stages of a run's start-up: what it does before its first step, and how long each takes."""

from __future__ import annotations

import msgspec

from memconsole.plan.plan import Plan
from memconsole.plan.training.origin import FINE_TUNES

FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}
TIMED = frozenset(
    {"starting", "import", "data", "tokenizer", "build", "reference", "preflight", "compile"}
    | {"evaluate", "checkpoint", "sample", "stopping", "paused"}
)
"""Phases whose duration is shown: all but those that take steps."""
COUNTED = frozenset({"reference"})
"""Phases whose detail says how far they are."""
REHEARSED = "rehearsed"
"""The detail of the first step of an attempt that has rehearsed a step, and so has compiled it."""
MOST_STAGES = 24
_DOING = {
    "starting": "starting",
    "import": "importing the framework",
    "data": "reading the data",
    "tokenizer": "making the tokenizer",
    "build": "building the model",
    "reference": "scoring answers with the starting weights",
    "preflight": "rehearsing before training",
    "compile": "taking the first step",
    "train": "training",
    "evaluate": "evaluating",
    "checkpoint": "writing a checkpoint",
    "sample": "sampling",
}


class Stage(msgspec.Struct, frozen=True):
    """One stage."""

    phase: str
    detail: str = ""
    seconds: float = 0.0
    """How long it took, or has taken so far."""
    running: bool = False


class StageMark(msgspec.Struct, array_like=True):
    """A stage and when it began, in seconds of the machine's clock."""

    phase: str
    detail: str
    since: float


def first_step_detail(marks: list[StageMark]) -> str:
    """The detail of the first step that follows the stages `marks`."""
    steps = ("preflight", "training step")
    return REHEARSED if any((mark.phase, mark.detail) == steps for mark in marks) else ""


def marked(marks: list[StageMark], phase: str, detail: str, since: float) -> list[StageMark]:
    """The marks with one more, unless the last stage goes on."""
    if marks and marks[-1].phase == phase:
        if not detail or detail == marks[-1].detail:
            return marks
        if phase in COUNTED:
            return [*marks[:-1], StageMark(phase, detail, marks[-1].since)]
    return [*marks, StageMark(phase, detail, since)][-MOST_STAGES:]


def stages_of(marks: list[StageMark], end: float | None, running: bool) -> tuple[Stage, ...]:
    """The stages with their durations; the last one ends at `end`. Stages without a duration are left out."""
    ends = [*(mark.since for mark in marks[1:]), end if end is not None else 0.0]
    found = [
        Stage(mark.phase, mark.detail, max(0.0, until - mark.since), running and n == len(marks))
        for n, (mark, until) in enumerate(zip(marks, ends, strict=False), 1)
    ]
    return tuple(stage for stage in found if stage.running or stage.seconds >= 0.05)


def stage_words(phase: str, detail: str, plan: Plan) -> str:
    """What a phase does, in words that name the framework: ``compiling the training step``."""
    framework = FRAMEWORKS.get(plan.backend, plan.backend)
    compiled = plan.backend == "jax" or plan.optimize.compile
    match phase:
        case "starting":
            return "starting the trainer"
        case "import":
            return f"importing {framework}"
        case "data":
            return f"reading the data: {detail}" if detail else "reading the data"
        case "tokenizer":
            return "making the tokenizer" if not detail else f"tokenizer: {detail}"
        case "build":
            built = "compiling the model" if plan.backend == "jax" else "building the model"
            if detail == FINE_TUNES:
                return f"{built} to fine-tune"
            return f"{built}, {detail}" if detail else built
        case "reference":
            return detail or "scoring answers with the starting weights"
        case "preflight" if detail == "training step":
            return "compiling the training step" if compiled else "rehearsing a training step"
        case "preflight" if detail == "evaluation":
            return "compiling the evaluation" if compiled else "rehearsing an evaluation"
        case "preflight":
            return "rehearsing a checkpoint" if detail.startswith("checkpoint") else "rehearsing"
        case "compile":
            compiles = compiled and detail != REHEARSED
            return "compiling the training step" if compiles else "taking the first step"
    return f"{phase}: {detail}" if detail else phase


def during(phase: str) -> str:
    """When something happened: ``while training``, ``in phase predict``."""
    return f"while {_DOING[phase]}" if phase in _DOING else f"in phase {phase}"
