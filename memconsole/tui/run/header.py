"""The top of the run screen: the run, its state, phase, progress and time left."""

from __future__ import annotations

from memconsole.runs.read.snapshot import RunSnapshot
from memconsole.runs.read.words import paused, state_word
from memconsole.runs.record.states import OUT_OF_MEMORY
from memconsole.tui.draw.bars import bar
from memconsole.tui.draw.ink import Line, Span, fit, width_of
from memconsole.tui.draw.words import duration_word, state_mark
from memconsole.tui.views.run_view import RunView
from memconsole.tui.widgets.painted import Painted


def header_lines(view: RunView, width: int) -> list[Line]:
    """Two rows, and a third one if something goes wrong. Pure in `view`."""
    run = view.snapshot
    if run is None:
        return [[Span(f" {view.problem or 'reading the run …'}", "bad" if view.problem else "dim")]]
    mark, role = state_mark(run)
    line: Line = [
        Span(f" {mark} {state_word(run)} ", role),
        Span(f" {run.name or run.id}", "strong"),
    ]
    device = run.facts.started.device_name if run.facts.started else run.plan.device.name
    about = f"  {run.plan.model.name} · {run.plan.backend} · {device}"
    if run.job and run.state != "queued":
        about += f" · {run.job}"
    if run.attempt > 1:
        about += f" · attempt {run.attempt}"
    if run.pause_requested != paused(run) and view.live:
        about += " · pauses after this step" if run.pause_requested else " · goes on"
    if run.stop_requested_by and view.live:
        about += f" · stop asked by {run.stop_requested_by}"
    if run.missing_records:
        line.append(Span(f"  ▲ {run.missing_records:,} records missing", "warn"))
    line.append(Span(fit(about, width - width_of(line)), "dim"))
    return [line, progress_line(view, run, width), *symptom_lines(view, width)]


def symptom_lines(view: RunView, width: int) -> list[Line]:
    """What goes wrong, and the key that shows what helps; empty if nothing does."""
    symptom = view.symptom
    if symptom is None:
        return []
    key = f" — {view.keys.shown('run', 'helps')}: what helps" if symptom.helps else ""
    words = fit(f" ▲ {symptom.words}", max(0, width - len(key)))
    return [[Span(words.rstrip(), "warn"), Span(key, "warn")]]


def progress_line(view: RunView, run: RunSnapshot, width: int) -> Line:
    """Phase, steps, bar, percent and ETA; for an ended run, why it ended."""
    if view.problem:
        return [Span(fit(f" ✗ {view.problem}", width), "bad")]
    if not view.live and run.verdict is not None:
        return _ended_line(view, run, width)
    facts = run.facts
    if run.state == "queued":
        return [Span(fit(f" {run.job}", width), "accent")]
    if run.unsaved:
        return [Span(fit(f" ▲ {run.unsaved}", width), "bad")]
    if run.stalled_seconds is not None:
        words = f" ▲ no progress for {duration_word(run.stalled_seconds)} in {facts.phase}"
        return [Span(fit(words, width), "warn")]
    steps = f"step {facts.step:,}"
    if facts.total_steps:
        steps += f"/{facts.total_steps:,}"
    if facts.epoch:
        steps += f" · epoch {facts.epoch}"
        if not run.plan.train.max_steps:
            steps += f"/{run.plan.train.epochs}"
    phase = facts.phase + (
        f" ({facts.phase_detail})" if facts.phase_detail and not facts.step else ""
    )
    head: Line = [Span(f" {fit(phase, max(10, width - 50))} ", "accent"), Span(f" {steps}  ")]
    if not facts.total_steps:
        return head
    share = min(1.0, facts.step / facts.total_steps)
    eta = "ETA " + duration_word(run.eta_seconds) if run.eta_seconds is not None else "ETA —"
    tail = f" {share * 100:3.0f} %  {eta} "
    room = width - width_of(head) - len(tail)
    if room >= 6:
        head += bar(float(facts.step), float(facts.total_steps), room, role="good")
    head.append(Span(fit(tail, width - width_of(head))))
    return head


def _ended_line(view: RunView, run: RunSnapshot, width: int) -> Line:
    verdict = run.verdict
    assert verdict is not None
    role = "good" if verdict.reason in ("finished", "stopped") else "bad"
    words = f" {verdict.reason.replace('_', ' ')}: {verdict.evidence}"
    if verdict.reason in OUT_OF_MEMORY:
        words += f" — {view.keys.shown('run', 'remedies')} lists what would have saved it"
    elif verdict.resumable:
        words += f" — {view.keys.shown('run', 'resume')} resumes it"
    if role == "bad" and run.facts.error is not None and run.facts.error.message not in words:
        words += f" · {run.facts.error.message}"
    return [Span(fit(words, width), role)]


class RunHeader(Painted):
    """Shows the two header rows."""

    _view: RunView = RunView()

    def show(self, view: RunView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return header_lines(self._view, width)
