"""The top of the run screen: the run, its state, phase, progress and time left."""

from __future__ import annotations

import math
import re

from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.words import ended_why, paused, resume_command, state_word
from memconsole.runs.read.state.stages import TIMED, stage_words
from memconsole.runs.record.states import LIVE, OUT_OF_MEMORY
from memconsole.tui.draw.bars import bar
from memconsole.tui.draw.lines import Line, Span, fit, width_of, wrap
from memconsole.tui.draw.words import duration_word, state_mark, step_word
from memconsole.tui.views.run_view import RunView
from memconsole.tui.widgets.painted import Painted
from memconsole.units import format_clock, format_duration

SLOW_STEP_SECONDS = 2.0
"""Steps that take longer are counted in tenths."""
LEAST_NAME = 20
"""Cells that a long name has at least, beside the model, the backend and the device."""
_EVIDENCE_SOURCE = re.compile(r" \([^()]*\)$")
"""Where the evidence of a verdict comes from; the report says it, too."""
_UNUSED_CELLS = 16
"""Cells that a row may leave free because the next word does not fit."""


def header_lines(view: RunView, width: int, height: int = 2) -> list[Line]:
    """Two rows, one more if something goes wrong, and one about time if there is room for it.

    Pure in `view`.
    """
    run = view.snapshot
    if run is None:
        return [[Span(f" {view.problem or 'reading the run …'}", "bad" if view.problem else "dim")]]
    mark, role = state_mark(run)
    line: Line = [Span(f" {mark} {state_word(run)} ", role)]
    about = _about_words(view, run)
    missing = f"  ▲ {run.missing_records:,} records missing" if run.missing_records else ""
    room = width - width_of([*line, Span(missing + about)])
    line.append(Span(fit(f" {run.name or run.id}", max(room, LEAST_NAME)), "strong"))
    line.append(Span(missing, "warn"))
    line.append(Span(fit(about, width - width_of(line)), "dim"))
    ended = not view.problem and not view.live and run.verdict is not None
    lines = [line, *(ended_lines(view, run, width) if ended else [progress_line(view, run, width)])]
    lines += symptom_lines(view, width)
    if height > len(lines) and (times := time_line(view, width)):
        lines.insert(2, times)
    return lines


def _about_words(view: RunView, run: RunSnapshot) -> str:
    """What runs where, and what has been asked of it."""
    device = run.facts.started.device_name if run.facts.started else run.plan.device.name
    words = f"  {run.plan.model.name} · {run.plan.backend} · {device}"
    if run.job and run.state != "queued":
        words += f" · {run.job}"
    if run.attempt > 1:
        words += f" · attempt {run.attempt}"
    if run.pause_requested != paused(run) and view.live:
        words += " · pauses after this step" if run.pause_requested else " · goes on"
    if run.stop_requested_by and view.live:
        words += f" · stop asked by {run.stop_requested_by}"
    return words


def symptom_lines(view: RunView, width: int) -> list[Line]:
    """What goes wrong, and the key that shows what helps; empty if nothing does."""
    symptom = view.symptom
    if symptom is None:
        return []
    key = f" — {view.keys.shown('run', 'helps')}: what helps" if symptom.helps else ""
    words = fit(f" ▲ {symptom.words}", max(0, width - len(key)))
    return [[Span(words.rstrip(), "warn"), Span(key, "warn")]]


def progress_line(view: RunView, run: RunSnapshot, width: int) -> Line:
    """Phase, steps, bar, percent and ETA of a run that has not ended."""
    if view.problem:
        return [Span(fit(f" ✗ {view.problem}", width), "bad")]
    facts = run.facts
    if run.state == "queued":
        return [Span(fit(f" {run.waits or run.job}", width), "accent")]
    if run.unsaved:
        return [Span(fit(f" ▲ {run.unsaved}", width), "bad")]
    if run.stalled_seconds is not None:
        words = f" ▲ no progress for {duration_word(run.stalled_seconds)} in {facts.phase}"
        return [Span(fit(words, width), "warn")]
    if not facts.step and facts.loss is None:
        return _start_line(run, width)
    steps = f"step {steps_word(run)}"
    if facts.total_steps:
        steps += f"/{facts.total_steps:,}"
    if facts.step < facts.repeats_to:
        steps += f" (repeats to {facts.repeats_to:,})"
    if facts.epoch:
        steps += f" · epoch {facts.epoch}"
        if not run.plan.train.max_steps:
            steps += f"/{run.plan.train.epochs}"
    phase = stage_words(facts.phase, "", run.plan)
    if facts.phase in TIMED and run.phase_seconds is not None:
        phase += f" {format_clock(run.phase_seconds)}"
    head: Line = [Span(f" {fit(phase, max(10, width - 50))} ", "accent"), Span(f" {steps}  ")]
    if not facts.total_steps:
        return head
    done = min(max(run.steps_done, facts.step), facts.total_steps)
    left = f"{duration_word(run.eta_seconds)} left" if run.eta_seconds is not None else ""
    tail = f" {math.floor(100 * done / facts.total_steps):3} %  {left} "
    room = width - width_of(head) - len(tail)
    if room >= 6:
        head += bar(float(done), float(facts.total_steps), room, role="good")
    head.append(Span(fit(tail, width - width_of(head))))
    return head


def steps_word(run: RunSnapshot) -> str:
    """The steps taken; if a step takes seconds, with the tenth of the one being taken."""
    done = max(run.steps_done, run.facts.step)
    slow = run.pace_seconds is not None and run.pace_seconds >= SLOW_STEP_SECONDS
    return f"{int(done * 10) / 10:,.1f}" if slow and run.state in LIVE else f"{int(done):,}"


def _start_line(run: RunSnapshot, width: int) -> Line:
    """The stage of the start-up that the run is in, and how long it has been in it."""
    facts = run.facts
    words = stage_words(facts.phase, facts.phase_detail, run.plan)
    line: Line = [Span(f" {fit(words, max(10, width - 40))} ", "accent")]
    if run.phase_seconds is not None:
        line.append(Span(f" {format_clock(run.phase_seconds)}"))
    more = f"  {format_clock(run.elapsed_seconds)} since the start"
    if facts.total_steps:
        more += f" · {facts.total_steps:,} steps to take"
    return [*line, Span(fit(more, width - width_of(line)), "dim")]


def time_line(view: RunView, width: int) -> Line:
    """What the elapsed time and the time left consist of."""
    run = view.snapshot
    if run is None or run.state == "queued":
        return []
    start = sum(stage.seconds for stage in run.stages)
    words = f" {'elapsed' if view.live else 'took'} {format_duration(run.elapsed_seconds)}"
    if start >= 0.5:
        words += f" (start-up {format_duration(start)})"
    total, pace, eta = run.facts.total_steps, run.pace_seconds, run.eta_seconds
    if view.live and total and pace is not None and eta is not None:
        left = max(0.0, total - max(run.steps_done, run.facts.step))
        words += f" · left {duration_word(eta)} = {math.ceil(left):,} steps × {step_word(pace)}"
        rest = eta - left * pace
        words += f" + {format_duration(rest)} of evaluating and saving" if rest >= 0.5 else ""
    elif view.live and run.facts.step:
        words += " · time left: known after the next steps"
    return [Span(fit(words, width), "dim")]


def _short_id(run_id: str) -> str:
    """The random end of a run's id, by which commands find it."""
    return run_id.rpartition("-")[2]


def ended_lines(view: RunView, run: RunSnapshot, width: int) -> list[Line]:
    """Why the run ended, and the key that helps; in two rows if it failed and one row is too short."""
    verdict = run.verdict
    assert verdict is not None
    good = verdict.reason in ("finished", "stopped")
    words = ended_why(verdict.reason, verdict.evidence)
    message = run.facts.error.message.strip() if run.facts.error is not None else ""
    if not good and message and verdict.reason not in OUT_OF_MEMORY:
        first = message.splitlines()[0]
        words += "" if first in words else f" · {first}"
    key = ""
    if verdict.reason in OUT_OF_MEMORY:
        key = f" — {view.keys.shown('run', 'remedies')} lists what would have saved it"
    elif view.resumable and verdict.reason == "nan":
        key = f" — {resume_command(_short_id(run.id), verdict.reason)} goes on"
    elif view.resumable:
        key = f" — {view.keys.shown('run', 'resume')} resumes it"
    rows = 1 if good or view.symptom is not None else 2
    room = rows * (width - 1) - (rows - 1) * _UNUSED_CELLS - len(key)
    if good and len(words) > room:
        words = _EVIDENCE_SOURCE.sub("", words)
    wrapped = wrap(fit(words, room) + key, width - 1, rows)
    return [[Span(f" {row}", "good" if good else "bad")] for row in wrapped]


class RunHeader(Painted):
    """Shows the header rows."""

    _view: RunView = RunView()

    def show(self, view: RunView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return header_lines(self._view, width, height)
