"""The state, the minutes and the speed of a run, as every list, screen and command shows them."""

from __future__ import annotations

from typing import Protocol

from memconsole.runs.read.state.facts import FactsSoFar
from memconsole.runs.record.states import LIVE, State

KILLED, REFUSED = "killed", "refused"
NOTHING_LEARNED = "nothing learned"
"""In place of a loss: no token of the steps is learned. Training ends at a loss that is not finite."""


class Shown(Protocol):
    """What the word for a run's state depends on."""

    @property
    def state(self) -> State: ...
    @property
    def current_phase(self) -> str: ...
    @property
    def ended_by(self) -> str:
        """The reason of the verdict; empty while the run lives."""
        ...

    @property
    def unsaved(self) -> str: ...
    @property
    def refused(self) -> str: ...
    @property
    def damaged(self) -> str: ...


def paused(run: Shown) -> bool:
    """Whether the run is paused between two steps."""
    return run.state in ("running", "unsupervised") and run.current_phase == "paused"


def state_word(run: Shown) -> str:
    """The one word for a run's state: its `state`, or a more exact one.

    - cannot save: it lives, and its disk is full or fails.
    - paused: it waits between two steps.
    - damaged: it has ended, and files of it cannot be read.
    - refused: its plan was refused before anything was trained.
    - killed: somebody ended it without a checkpoint.
    """
    if run.unsaved:
        return "cannot save"
    if run.damaged and run.state not in LIVE:
        return "damaged"
    if run.state == "failed" and run.refused:
        return REFUSED
    if run.state == "failed" and run.ended_by == KILLED:
        return KILLED
    return "paused" if paused(run) else run.state


def ended_words(run: Shown) -> str:
    """The state, with the reason of a run that failed: ``failed: out of memory``."""
    word = state_word(run)
    if word not in ("failed", "lost", "orphaned", "damaged") or not run.ended_by:
        return word
    return f"{word}: {run.ended_by.replace('_', ' ')}"


def ended_why(reason: str, evidence: str) -> str:
    """Why a run ended: the reason and its evidence, without repeating a word."""
    word = reason.replace("_", " ")
    if evidence.startswith(word):
        return evidence
    return ": ".join(filter(None, (word, evidence)))


ANOTHER_RATE = "--set train.learning_rate=…"


def resume_command(run_id: str, ended_by: str) -> str:
    """The command that resumes a run, with another learning rate after numbers that were not finite: a resumed run
    computes the same ones again."""
    return " ".join(["memconsole resume", run_id, *([ANOTHER_RATE] if ended_by == "nan" else [])])


def total_minutes(facts: FactsSoFar, elapsed_seconds: float) -> float:
    """The minutes of training in all attempts, without starts and pauses. For a finished or stopped run it is
    the trainer's own count. An attempt that has taken no step has not trained."""
    last = facts.ended or facts.stopped
    if last is not None and last.total_minutes is not None:
        return last.total_minutes if facts.step else 0.0
    return facts.training_seconds(elapsed_seconds) / 60


def units_per_second(facts: FactsSoFar, live: bool) -> float | None:
    """The speed: of the newest steps while the run lives, and then of all its steps."""
    average = facts.average_units_per_second
    return facts.tokens_per_second if live or average is None else average
