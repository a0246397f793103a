"""The lower pane of the run screen: trainer output, sampled text, or the summary."""

from __future__ import annotations

from memconsole.tui.ink import Line, Span, fit, left, rule, wrap
from memconsole.tui.views import RunView
from memconsole.tui.widgets.line_chart import unigram_loss
from memconsole.tui.widgets.painted import Painted
from memconsole.tui.words import loss_word, minutes_word
from memconsole.units import format_bytes, format_duration


def output_lines(view: RunView, width: int) -> list[Line]:
    """Warnings, then the last lines of output, then the error if there is one."""
    run = view.snapshot
    if run is None:
        return []
    lines: list[Line] = [[Span(fit(f" ▲ {w}", width), "warn")] for w in run.warnings]
    if not run.log_tail and run.started is not None:
        lines += [[Span(fit(f" {t}", width), "dim")] for t in run.started.platform_lines]
    lines += [[Span(fit(f" {text}", width))] for text in run.log_tail]
    if run.error is not None:
        lines += [[Span(t, "bad")] for t in wrap(f" {run.error.message}", width, 4)]
    return lines or [[Span(" no output yet", "dim")]]


def sample_lines(view: RunView, width: int) -> list[Line]:
    """The newest sampled text; the prompt stands out."""
    run = view.snapshot
    if run is None or run.sample is None:
        return [[Span(" a text is sampled at each evaluation", "dim")]]
    sample = run.sample
    lines: list[Line] = [
        [Span(fit(f" step {sample.step:,}: {sample.prompt!r} …", width), "accent")]
    ]
    for row in (sample.prompt + sample.text).splitlines():
        lines += [[Span(f" {part}")] for part in _broken(row, width - 1)]
    return lines


def _broken(row: str, width: int) -> list[str]:
    """A row of sampled text in pieces of `width` characters; indentation matters, so no reflow."""
    row = row.expandtabs(4)
    width = max(1, width)
    return [row[n : n + width] for n in range(0, len(row), width)] or [""]


def summary_rows(view: RunView) -> list[tuple[str, str, str]]:
    """The final summary as (name, value, role)."""
    run = view.snapshot
    if run is None:
        return []
    ended = run.ended
    rows: list[tuple[str, str, str]] = []
    validation = [e.loss for e in run.evaluations if e.loss is not None]
    best = ended.best_validation_loss if ended else min(validation, default=None)
    final = ended.final_validation_loss if ended else (validation[-1] if validation else None)
    unigram = unigram_loss(run)
    if best is not None or final is not None:
        text = f"best {_loss(best)} · final {_loss(final)}"
        if unigram is not None:
            text += f" · unigram {unigram:.3f}"
        rows.append(("validation loss", text, "validation"))
    train = ended.final_train_loss if ended else run.loss
    if train is not None:
        rows.append(("final train loss", loss_word(train), "train"))
    minutes = ended.average_epoch_minutes if ended else None
    if minutes is None and run.epochs:
        minutes = sum(e.minutes for e in run.epochs) / len(run.epochs)
    total = ended.total_minutes if ended else run.elapsed_seconds / 60
    time = f"{minutes_word(total)} minutes in all"
    if minutes is not None:
        time = f"{minutes_word(minutes)} minutes per epoch · {time}"
    rows.append(("time", time, ""))
    device = run.started.device_name if run.started else run.plan.device.name
    rows.append(("device", f"{device} · {run.plan.backend}", ""))
    rows += _memory_rows(view)
    rows.append(("run", f"{run.id} · step {run.step:,} · attempts {run.attempt}", ""))
    return rows


def _loss(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}"


def _memory_rows(view: RunView) -> list[tuple[str, str, str]]:
    run = view.snapshot
    if run is None:
        return []
    table = view.prediction.table if view.prediction else None
    rows = []
    for name, measured, predicted in (
        ("memory peak", run.peak_bytes, table.peak_bytes if table else None),
        ("host RAM peak", run.peak_host_bytes, table.host_bytes if table else None),
    ):
        text = "measured " + (format_bytes(measured) if measured is not None else "n/a")
        if predicted is not None:
            text += f" · predicted ~{format_bytes(predicted)}"
            if measured:
                text += f" ({(predicted - measured) / measured:+.0%})"
        rows.append((name, text, ""))
    return rows


def summary_lines(view: RunView, width: int) -> list[Line]:
    """The final summary."""
    lines: list[Line] = []
    for name, text, role in summary_rows(view):
        head = Span(" " + left(name, 17), "dim")
        pieces = wrap(text, width - 18, 2)
        for n, piece in enumerate(pieces or [""]):
            lines.append([head if n == 0 else Span(" " * 18), Span(piece, role)])
    if view.snapshot is not None and view.live:
        lines.insert(
            0,
            [Span(fit(f" so far, {format_duration(view.snapshot.elapsed_seconds)}", width), "dim")],
        )
    return lines


TITLES = {"output": "output", "sample": "sample text", "summary": "summary"}


class OutputPane(Painted):
    """Shows one of the three from its end (output) or its start; `o` switches, arrows move."""

    _view: RunView = RunView()

    def show(self, view: RunView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        view = self._view
        room = max(0, height - 1)
        pane = view.pane
        if pane == "output":
            lines = output_lines(view, width)
            first = max(0, len(lines) - room - max(0, view.scroll))
        else:
            lines = sample_lines(view, width) if pane == "sample" else summary_lines(view, width)
            first = min(max(0, -view.scroll), max(0, len(lines) - room))
        others = " · ".join(t for p, t in TITLES.items() if p != pane)
        note = f"o: {others}"
        behind = len(lines) - first - room
        if pane == "output" and behind > 0:
            note = f"{behind} more lines below"
        return [rule(TITLES[pane], width, note), *lines[first : first + room]]
