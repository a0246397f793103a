"""Reads the current state of a run from its files, for every screen and command."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.sections.hybrid import PHASES as HYBRID_PHASES
from memconsole.plan.tasks import task_of
from memconsole.plan.training.origin import checkpoint_of
from memconsole.runs.read.history import History
from memconsole.runs.read.life.ladder import rungs, stepped
from memconsole.runs.read.life.liveness import Liveness, liveness, refusal
from memconsole.runs.read.shown.clean_records import clean_texts
from memconsole.runs.read.shown.log_tail import LogTail
from memconsole.runs.read.shown.missing import MissingCounts
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.status import RunStatus
from memconsole.runs.read.shown.symptoms import symptoms_of
from memconsole.runs.read.shown.unread import Unread, unread
from memconsole.runs.read.shown.unsaved import unsaved_words
from memconsole.runs.read.shown.words import units_per_second
from memconsole.runs.read.state.facts import facts_of
from memconsole.runs.read.state.figures import best_evaluation
from memconsole.runs.read.state.pace import eta_seconds, pace_seconds
from memconsole.runs.read.state.reduce import RunState
from memconsole.runs.read.state.saved_state import SavedState, read_saved, write_saved
from memconsole.runs.read.state.stages import Stage, stages_of
from memconsole.runs.read.state.stall import stall_limit_seconds
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.labels import read_labels
from memconsole.runs.record.log.eventreader import EventReader
from memconsole.runs.record.processes.heartbeat import Heartbeat, read_heartbeat
from memconsole.runs.record.processes.identity import boot_seconds
from memconsole.runs.record.records import OUTPUT
from memconsole.runs.record.requests import pause_asked, stop_requests
from memconsole.runs.record.states import WAIT_DISK, Verdict, may_resume
from memconsole.runs.record.trackers import tracked_at, tracker_problems
from memconsole.sanitize import clean_line

MOST_OF_A_STEP = 0.95
"""The greatest share of the current step that is shown as done, if it takes longer than the steps before it."""


class Follower:
    """Follows one run. Each poll reads only what was added. Damaged files never make it raise.

    All attempts of a run are read as one history. Texts in a snapshot have no control characters.
    """

    def __init__(
        self, run: RunDirectory, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Continues from `state.json` if there is one, so attaching to a long run is instant."""
        self.run = run
        self._monotonic = monotonic
        self._history = History(run, RunState())
        self._log: LogTail | None = None
        self._last_progress: object = None
        self._last_progress_at = self._newest_step_at = self._opened = monotonic()
        self._newest_step = -1
        self._saved: tuple[int, int, int] | None = None
        record = run.record()
        self._created = run.created_wall
        self._plan, self._by_recipe, why = _read_plan(run)
        self._plan_read, self._plan_of = why is None, run.newest_attempt()
        self._problems: tuple[str, ...] = ()
        self._other_version = ""
        if why is not None and why.other_version:
            self._other_version = why.words
        elif why is not None:
            self._problems = (why.words,)
        if record is None:
            self._problems += ("run.json is missing or damaged",)
        self._load()

    def poll(self) -> RunSnapshot:
        """The run's current state."""
        # Check liveness before the events, so that the last records of an ended run are included.
        life = liveness(self.run)
        self._renew_plan()
        self._catch_up()
        state = self.state
        beat = self._heartbeat(life)
        phase = "queued" if life.state == "queued" else state.phase
        unsaved = unsaved_words(self.run, beat) if life.live else ""
        if beat is not None and (phase == "starting" or unsaved):
            phase = clean_line(beat.phase, 16)
        labels = read_labels(self.run.path)
        working = life.live and life.state not in ("queued", "starting")
        steps_done = self._steps_done(beat, phase) if working else float(state.step)
        return RunSnapshot(
            id=clean_line(self.run.id, 80),
            name=self.run.name,
            state=life.state,
            plan=self._plan,
            by_recipe=self._by_recipe,
            attempt=life.attempt or state.attempt,
            created_wall=self._created,
            facts=facts_of(state, phase=phase),
            verdict=_clean_verdict(life.verdict),
            stalled_seconds=self._stalled(beat, phase) if working else None,
            refused=clean_line(refusal(self.run, life.verdict), 500),
            damaged="; ".join(self._problems),
            tags=labels.tags,
            note=labels.note,
            tracked=tracked_at(self.run.path),
            eta_seconds=eta_seconds(state, steps_done) if life.live else None,
            pace_seconds=pace_seconds(state),
            steps_done=steps_done,
            phase_seconds=self._phase_seconds(state) if life.live else None,
            stages=self._stages(life),
            symptoms=symptoms_of(self._plan, state),
            elapsed_seconds=_elapsed(state, life),
            recent_train=state.train.recent(),
            train=state.train.whole(),
            validation=state.validation.whole(),
            series=state.series.curves(),
            recent_series=state.series.curves(recent=True),
            samples=tuple(state.samples),
            epochs=tuple(mark.event for mark in state.epochs),
            evaluations=tuple(state.evaluations),
            gauges=state.gauges.curves(),
            warnings=(
                *self._problems,
                *filter(None, (self._other_version,)),
                *tracker_problems(self.run.path),
                *state.warnings,
            ),
            log_tail=self._log.poll() if self._log else (),
            unsaved=clean_line(unsaved, 500),
            job=clean_line(life.job, 300),
            waits=clean_line(life.waits, 300),
            stop_requested_by=self._stop_requested_by(life),
            pause_requested=life.live and life.state != "queued" and pause_asked(self.run),
            missing_records=self._history.missing,
        )

    @property
    def state(self) -> RunState:
        """The state after the events read so far; `poll` updates it."""
        return self._history.state

    def status(self) -> RunStatus:
        """One line about the run, without its log.

        An ended run has no supervisor that writes `state.json`. If much of the event log had to be read, this
        writes it.
        """
        life = liveness(self.run)
        self._catch_up()
        if not life.live and life.supervisor_pid is None and self._history.pieces > 1:
            self.save_state()
        unsaved = unsaved_words(self.run, self._heartbeat(life) if life.live else None)
        labels, state = read_labels(self.run.path), self.state
        refused = clean_line(refusal(self.run, life.verdict), 500)
        task = task_of(self._plan)
        best = best_evaluation(task, state.evaluations)
        return RunStatus(
            id=clean_line(self.run.id, 80),
            name=self.run.name,
            state=life.state,
            ended_by=clean_line(life.verdict.reason, 80) if life.verdict else "",
            begun_from=_parent_run(self._plan),
            evidence=clean_line(life.verdict.evidence, 500) if life.verdict else "",
            phase=self._phase(life, unsaved),
            unsaved=clean_line(unsaved, 500),
            step=self.state.step,
            total_steps=self.state.total_steps or self._plan.train.max_steps,
            loss=self.state.loss,
            backend=self._plan.backend if self._plan_read else "?",
            model=self._plan.model.name if self._plan_read else "?",
            created_wall=self._created,
            duration_seconds=_elapsed(state, life),
            units_per_second=units_per_second(state, life.live),
            unit=task.unit,
            best=best.value if best else None,
            best_by=best.measure.name if best else "",
            best_step=best.step if best else None,
            peak_bytes=state.peak_bytes,
            tags=labels.tags,
            note=labels.note,
            refused=refused,
            resumable=may_resume(life.state, refused),
            missing_records=self._history.missing,
            job=clean_line(life.job, 300),
            waits=clean_line(life.waits, 300),
            damaged="; ".join(self._problems),
            other_version=self._other_version,
        )

    def save_state(self) -> bool:
        """Write `state.json` for the next reader. The supervisor calls this about once a second.

        Needs no lock: the file is replaced as a whole, and a reader can continue from any state of the run. Returns
        False if there is nothing new or the disk refuses.
        """
        self._catch_up()
        reader = self._history.reader
        if reader is None or reader.position == self._saved:
            return False
        damaged, unseen = self._history.counts.counts(reader)
        saved = SavedState(
            position=reader.position, damaged=damaged, unseen=unseen, state=self.state
        )
        try:
            write_saved(self.run.state_path, saved)
        except OSError:
            return False
        self._saved = reader.position
        return True

    def _load(self) -> None:
        """Continue from `state.json`, unless it is missing, damaged or does not match the log."""
        saved = read_saved(self.run.state_path)
        if saved is None:
            return
        attempt, (segment, offset, _) = saved.state.attempt, saved.position
        directory = self.run.attempt_path(attempt)
        if attempt not in self.run.attempt_numbers():
            return
        try:
            if segment and (directory / f"events-{segment:06d}.log").stat().st_size < offset:
                return
        except OSError:
            return
        self._history.state = clean_texts(saved.state)
        self._history.counts = MissingCounts(saved.damaged, saved.unseen)
        self._history.reader = EventReader(directory, saved.position)
        self._saved = saved.position

    def _renew_plan(self) -> None:
        """Read the plan again if another attempt has begun: settings may have changed when the run was resumed, and sizes
        when it ran out of memory."""
        attempt = self.run.newest_attempt()
        if attempt == self._plan_of:
            return
        self._plan_of = attempt
        plan, by_recipe, why = _read_plan(self.run)
        if why is None:
            self._plan, self._by_recipe, self._plan_read = plan, by_recipe, True

    def _catch_up(self) -> None:
        """Read every new record."""
        for _ in self._history.new():
            pass
        path = self.run.attempt_path(self.state.attempt) / OUTPUT
        if self._history.reader is not None and (self._log is None or self._log.path != path):
            self._log = LogTail(path)

    def _stalled(self, beat: Any, phase: str) -> float | None:
        """Seconds since the heartbeat or the log changed, if that is too long for the phase.

        None otherwise. Only this reader's own clock is used: clocks of two hosts cannot be
        subtracted.
        """
        reader = self._history.reader
        position = reader.position if reader else None
        now = self._monotonic()
        if (beat, position) != self._last_progress:
            self._last_progress, self._last_progress_at = (beat, position), now
        if beat is not None:
            phase = beat.phase
        silent = now - self._last_progress_at
        return silent if silent > stall_limit_seconds(self.state, phase) else None

    def _steps_done(self, beat: Heartbeat | None, phase: str) -> float:
        """The steps done by the heartbeat, plus a share of the next step by this reader's clock."""
        state, now = self.state, self._monotonic()
        done = max(state.step, beat.step if beat is not None else 0)
        if done != self._newest_step:
            self._newest_step, self._newest_step_at = done, now
        pace = pace_seconds(state)
        if pace is None or not (phase == "train" or phase in HYBRID_PHASES):
            return float(done)
        return done + min(MOST_OF_A_STEP, (now - self._newest_step_at) / pace)

    def _phase_seconds(self, state: RunState) -> float:
        """How long the current phase has lasted. Before the first event: since this reader started."""
        if state.phase_since is None:
            return self._monotonic() - self._opened
        return max(0.0, boot_seconds() - state.phase_since)

    def _stages(self, life: Liveness) -> tuple[Stage, ...]:
        """The stages of this attempt's start. A live run started in this boot, so its clock is usable."""
        state = self.state
        if state.trained:  # the last mark is the first step
            return stages_of(state.stages[:-1], state.stages[-1].since, running=False)
        return stages_of(
            state.stages, boot_seconds() if life.live else state.last_boot, running=life.live
        )

    def _heartbeat(self, life: Liveness) -> Heartbeat | None:
        """The heartbeat of the newest attempt; None while the next one waits in a queue."""
        number = self.state.attempt
        if not number or life.state == "queued":
            return None
        return read_heartbeat(self.run.attempt_path(number))

    def _phase(self, life: Liveness, unsaved: str) -> str:
        if life.state == "queued":
            return "queued"
        return WAIT_DISK if unsaved else self.state.phase

    def _stop_requested_by(self, life: Liveness) -> str | None:
        if life.attempt is None or life.state == "queued":
            return None
        requests = stop_requests(self.run, life.attempt)
        return clean_line(requests[0].who, 80) if requests else None


def status(run: RunDirectory) -> RunStatus:
    """One line about a run. Takes milliseconds if its supervisor has left a `state.json`."""
    return Follower(run).status()


def _read_plan(run: RunDirectory) -> tuple[Plan, frozenset[str], Unread | None]:
    """The plan of the run's newest attempt, the settings that the recipe chose, and why it cannot be read."""
    try:
        plan, by_recipe = run.read_settled_plan()
        return clean_texts(stepped(plan, rungs(run))), by_recipe, None
    except PlanError as error:
        return Plan(), frozenset(), unread(run, error)


def _parent_run(plan: Plan) -> str:
    """The id of the run whose weights `plan` starts from; empty if there is none."""
    checkpoint = checkpoint_of(plan)
    return "" if checkpoint is None else clean_line(checkpoint.parent.parent.name, 80)


def _clean_verdict(verdict: Verdict | None) -> Verdict | None:
    if verdict is None:
        return None
    reason, evidence = clean_line(verdict.reason, 80), clean_line(verdict.evidence, 500)
    return msgspec.structs.replace(verdict, reason=reason, evidence=evidence)


def _elapsed(state: RunState, life: Liveness) -> float:
    """Seconds trained in all attempts. A live run of this machine started in this boot, so its clock is
    usable."""
    seconds = state.attempt_seconds
    if life.state == "queued":
        return state.earlier_seconds + seconds
    if life.live and not life.elsewhere and state.first_boot is not None:
        seconds = max(seconds, boot_seconds() - state.first_boot)
    return state.earlier_seconds + seconds
