"""The state of a run at one moment, for screens and commands."""

from __future__ import annotations

from typing import Any

import msgspec

from memconsole.plan.plan import Plan, replace
from memconsole.runs.read.curves.curve import Curve, GaugeCurves, SeriesCurves
from memconsole.runs.read.shown.missing import uncertain_figures
from memconsole.runs.read.shown.words import total_minutes, units_per_second
from memconsole.runs.read.state.facts import RunFacts
from memconsole.runs.read.state.figures import (
    average_epoch_minutes,
    best_validation_loss,
    final_train_loss,
)
from memconsole.runs.read.state.stages import Stage
from memconsole.runs.record.log import events
from memconsole.runs.record.states import LIVE, State, Verdict, may_resume


class Help(msgspec.Struct, frozen=True):
    """Settings to change, and what the change does."""

    changes: dict[str, Any]
    words: str

    @property
    def label(self) -> str:
        """The settings as a plan file writes them."""
        return ", ".join(f"{key} = {_spelled(value)}" for key, value in self.changes.items())

    @property
    def options(self) -> str:
        """The settings as options of the command line."""
        return " ".join(f"--set {key}={_spelled(value)}" for key, value in self.changes.items())


class Symptom(msgspec.Struct, frozen=True):
    """One thing that goes wrong."""

    name: str
    """waits_for_data | not_learning | overfitting"""
    words: str
    helps: tuple[Help, ...] = ()
    """Only settings that the plan accepts."""


_ALSO_TOLD_AT_THE_END = ("final_validation_loss", "epoch_count")
"""Figures of a snapshot that a report lacks, and that the trainer's last record has."""


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a screen or a command shows of a run. Text fields have no control characters."""

    id: str
    name: str
    state: State
    plan: Plan
    by_recipe: frozenset[str] = frozenset()
    """Settings of the plan that the recipe chose."""
    attempt: int
    created_wall: float
    facts: RunFacts = RunFacts()
    """What the events say. The fields below come from other files or from the reader's clock."""
    verdict: Verdict | None = None
    stalled_seconds: float | None = None
    """Seconds without progress, if longer than the phase allows."""
    eta_seconds: float | None = None
    """The steps left at `pace_seconds` each, with evaluating and saving; excludes compilation."""
    pace_seconds: float | None = None
    """Recent seconds of a step alone."""
    steps_done: float = 0.0
    """Steps done, with the fraction of the current step by the reader's clock."""
    phase_seconds: float | None = None
    """How long the current phase has lasted."""
    stages: tuple[Stage, ...] = ()
    """What this attempt did before its first step."""
    elapsed_seconds: float = 0.0
    recent_train: Curve = Curve()
    train: Curve = Curve()
    validation: Curve = Curve()
    series: SeriesCurves = SeriesCurves()
    recent_series: SeriesCurves = SeriesCurves()
    samples: tuple[events.Sample, ...] = ()
    """The newest sampled texts, the last one newest; long texts are cut."""
    epochs: tuple[events.Epoch, ...] = ()
    evaluations: tuple[events.Evaluation, ...] = ()
    gauges: GaugeCurves = GaugeCurves()
    warnings: tuple[str, ...] = ()
    log_tail: tuple[str, ...] = ()
    """Last lines of the trainer's output, with progress bars resolved."""
    unsaved: str = ""
    """What it cannot save and keeps in memory, because its disk is full or fails; usually empty."""
    job: str = ""
    """Its Slurm job and where it runs or why it waits, while it lives; "" for a run of this machine."""
    waits: str = ""
    """Which run of this machine it starts after, in words; "" if it waits for none."""
    stop_requested_by: str | None = None
    pause_requested: bool = False
    """A pause was requested; the run is paused once `phase` is paused."""
    refused: str = ""
    """Why the trainer refused the plan, if nothing was trained."""
    damaged: str = ""
    """Which of the run's files cannot be read, and why."""
    tags: tuple[str, ...] = ()
    note: str = ""
    tracked: tuple[tuple[str, str], ...] = ()
    """Trackers that show the run: name, and address or command."""
    symptoms: tuple[Symptom, ...] = ()
    """What goes wrong, with the settings that act on it."""
    missing_records: int = 0
    """Records that could not be read or are not there."""

    @property
    def given_plan(self) -> Plan:
        """The plan as the user set it, for another run. Settings that the recipe chose are left unset."""
        return replace(self.plan, dict.fromkeys(self.by_recipe))

    @property
    def current_phase(self) -> str:
        return self.facts.phase

    @property
    def ended_by(self) -> str:
        """The reason of the verdict; empty while the run lives."""
        return self.verdict.reason if self.verdict is not None else ""

    @property
    def resumable(self) -> bool:
        """Whether it has ended and can be resumed."""
        return may_resume(self.state, self.refused)

    @property
    def minutes(self) -> float:
        """Minutes of training in all attempts."""
        return total_minutes(self.facts, self.elapsed_seconds)

    @property
    def best_validation_loss(self) -> float | None:
        return best_validation_loss(self.facts, self.evaluations)

    @property
    def final_validation_loss(self) -> float | None:
        """The loss of the last evaluation; None before the first one, or if it was not finite."""
        if self.facts.ended is not None:
            return self.facts.ended.final_validation_loss
        return self.evaluations[-1].loss if self.evaluations else None

    @property
    def final_train_loss(self) -> float | None:
        return final_train_loss(self.facts)

    @property
    def epoch_count(self) -> int:
        """How many epochs have ended. `epochs` holds only the newest ones."""
        if self.facts.ended is not None:
            return self.facts.ended.epochs
        return self.epochs[-1].epoch if self.epochs else 0

    @property
    def average_epoch_minutes(self) -> float | None:
        return average_epoch_minutes(self.facts, self.epochs)

    @property
    def units_per_second(self) -> float | None:
        """The speed: of the newest steps while the run lives, and then of all its steps."""
        return units_per_second(self.facts, self.state in LIVE)

    @property
    def uncertain(self) -> tuple[str, ...]:
        """The figures that may be wrong because of missing records."""
        ended = self.facts.ended is not None
        found = uncertain_figures(self.missing_records, ended)
        return found if ended or not found else (*found, *_ALSO_TOLD_AT_THE_END)


def _spelled(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:.12g}"
