"""The lower pane of the run screen: trainer output, sampled text, the summary, or closed."""

from __future__ import annotations

from rich.cells import chop_cells
from textual import events

from memconsole.plan.tasks import task_of
from memconsole.tui.draw.lines import Line, Span, fit, rule, wrap
from memconsole.tui.draw.words import measure_word
from memconsole.tui.run.summary import summary_lines
from memconsole.tui.views.run_view import RunView
from memconsole.tui.widgets.painted import Painted


def output_lines(view: RunView, width: int) -> list[Line]:
    """Warnings, then the last lines of output, then the error if there is one."""
    run = view.snapshot
    if run is None:
        return []
    lines: list[Line] = [[Span(fit(f" ▲ {w}", width), "warn")] for w in run.warnings]
    if not run.log_tail and run.facts.started is not None:
        lines += [[Span(fit(f" {t}", width), "dim")] for t in run.facts.started.platform_lines]
    lines += [[Span(fit(f" {text}", width))] for text in run.log_tail]
    if run.facts.error is not None:
        lines += [[Span(t, "bad")] for t in wrap(f" {run.facts.error.message}", width, 4)]
    return lines or [[Span(" no output yet", "dim")]]


def sample_lines(view: RunView, width: int) -> list[Line]:
    """A sampled text, the newest unless an earlier one was stepped to. Its prompt is highlighted."""
    run = view.snapshot
    if run is None or run.facts.sample is None:
        why = task_of(run.plan).not_applicable(run.plan).get("train.sample_tokens") if run else None
        if run and run.plan.train.sample_tokens == 0:
            why = why or "train.sample_tokens = 0"
        words = f"no text is sampled: {why}" if why else "a text is sampled at each evaluation"
        return [[Span(fit(f" {words}", width), "dim")]]
    sample, words = run.facts.sample, ""
    count = len(run.samples)
    if count > 1:
        index = max(0, count - 1 - view.sample)
        sample = run.samples[index] if index < count - 1 else sample
        words = f"  {index + 1} of {count}"
    losses = [e.loss for e in run.evaluations if e.step == sample.step and e.loss is not None]
    if losses:
        words = f"  validation {measure_word(losses[0])}{words}"
    head = fit(f" step {sample.step:,}: {sample.prompt!r} …", max(12, width - len(words)))
    lines: list[Line] = [[Span(head, "accent"), Span(words, "dim")]]
    for row in (sample.prompt + sample.text).splitlines():
        lines += [[Span(f" {part}")] for part in _broken(row, width - 1)]
    return lines


def _broken(row: str, width: int) -> list[str]:
    """A row of sampled text in pieces of `width` cells, of which a wide character takes two; words are not rewrapped."""
    return chop_cells(row.expandtabs(4), max(2, width)) or [""]


def closed_lines(view: RunView, width: int) -> list[Line]:
    """How to open the pane. The text does not change while the run logs, so nothing is sent."""
    warnings = len(view.snapshot.warnings) if view.snapshot is not None else 0
    lines: list[Line] = [
        [Span(fit(f" closed: {view.keys.shown('run', 'pane')} shows the output", width), "dim")]
    ]
    if warnings:
        lines.append([Span(fit(f" ▲ {warnings} warning{'s' * (warnings > 1)}", width), "warn")])
    return lines


TITLES = {"output": "output", "sample": "sample text", "summary": "summary"}


class OutputPane(Painted):
    """Shows one of `PANES`: output from its end, the others from their start."""

    _view: RunView = RunView()

    def show(self, view: RunView) -> None:
        self._view = view
        self.repaint()

    def on_click(self, event: events.Click) -> None:
        """A click on the title row switches to the next pane."""
        if event.y == 0:
            event.stop()
            self.app.call_later(self.screen.run_action, "pane")

    def draw(self, width: int, height: int) -> list[Line]:
        view = self._view
        room = max(0, height - 1)
        pane = view.pane
        if pane == "closed":
            return [rule("output", width), *closed_lines(view, width)][:height]
        if pane == "output":
            lines = output_lines(view, width)
            first = max(0, len(lines) - room - max(0, view.scroll))
        else:
            lines = sample_lines(view, width) if pane == "sample" else summary_lines(view, width)
            first = min(max(0, -view.scroll), max(0, len(lines) - room))
        others = " · ".join(t for p, t in TITLES.items() if p != pane)
        note = f"{view.keys.shown('run', 'pane')}: {others}"
        behind = len(lines) - first - room
        if behind > 0:
            below = f"{behind} more line{'s' * (behind > 1)} below"
            note = below if pane == "output" else f"{below} · {note}"
        return [rule(TITLES[pane], width, note), *lines[first : first + room]]
