"""The charts of the run screen: a large one, and under it as many others side by side as there is room for."""

from __future__ import annotations

from textual import events

from memconsole.plan.tasks import task_of
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.state.figures import baseline_of, figures
from memconsole.runs.read.state.stages import stage_words
from memconsole.tui.draw.axes import Axes
from memconsole.tui.draw.chart import choose_axes, plot
from memconsole.tui.draw.lines import Line, Span, columns, fit, left, right, rule, width_of
from memconsole.tui.draw.words import loss_word, measure_word, state_mark
from memconsole.tui.run.charts import LOSS, Chart, charts_of, is_logarithmic
from memconsole.tui.views.run_view import RunView
from memconsole.tui.widgets.painted import Painted
from memconsole.units import format_clock, format_duration

LARGE_ROWS, SMALL_ROWS, MOST_SMALL_ROWS = 11, 7, 12
"""The least rows of the large chart, and the least and the most of the small ones."""
SMALL_CELLS, GAP = 24, 2
WIDE_CELLS = 60
"""Cells from which a title row shows the unit of the loss."""


def legend(run: RunSnapshot, logarithmic: bool, width: int) -> Line:
    """The chart's title row: names, glyphs and the last exact values. A name is shortened, or the
    baseline left out, before a name is cut."""
    tries = [(name, baseline) for baseline in (True, False) for name in ("validation", "val")]
    for name, baseline in tries:
        line = _legend(run, logarithmic, width, name, baseline)
        if width_of(line) <= width:
            break
    shown: Line = []
    for span in line:
        room = width - width_of(shown)
        shown.append(Span(fit(span.text, room), span.role))
    room = width - width_of(shown)
    if room > 2:
        shown.append(Span(" " + "─" * (room - 1), "dim"))
    return shown


def _legend(
    run: RunSnapshot, logarithmic: bool, width: int, validation: str, with_baseline: bool
) -> Line:
    task = task_of(run.plan)
    unit = f", {task.loss.unit}" if task.loss.unit and width >= WIDE_CELLS else ""
    line: Line = [Span(f" {task.loss.name}{unit} ", "title")]
    line.append(
        Span(f"─ train {loss_word(run.facts.loss) if run.facts.loss is not None else '—'}", "train")
    )
    if run.evaluations:
        last = run.evaluations[-1]
        line.append(Span(f"  ◆ {validation} {loss_word(last.loss)}", "validation"))
    baseline = baseline_of(task, run.evaluations)
    if baseline is not None and with_baseline:
        text = f"  ┄ {baseline.measure.name} {measure_word(baseline.value)}"
        line.append(Span(text, "baseline"))
    if logarithmic:
        line.append(Span("  log", "dim"))
    beside = run.evaluations[-1].train_loss if run.evaluations else None
    if beside is not None:
        word = f"  ◇ train rows {loss_word(beside)}"
        if len(word) <= width - width_of(line):
            line.append(Span(word, "train"))
    for figure in figures(task, run.evaluations[-1]) if run.evaluations else ():
        word = f"  {measure_word(figure.value)} {figure.measure.name}"
        if not figure.baseline and len(word) <= width - width_of(line):  # never cut
            line.append(Span(word, "validation"))
    return line


def start_lines(run: RunSnapshot, live: bool, width: int, height: int) -> list[Line]:
    """In place of an empty chart: the stages of the start-up, each with its time."""
    lines: list[Line] = [[]]
    times = [
        (format_clock if stage.running else format_duration)(stage.seconds) for stage in run.stages
    ]
    clock = max(map(len, times), default=0)
    for n, stage in enumerate(run.stages, 1):
        mark = Span(" ● ", "accent") if stage.running else Span(" ✓ ", "good")
        if n == len(run.stages) and not live and not run.facts.step:
            mark = Span(f" {state_mark(run)[0]} ", state_mark(run)[1])  # where it ended
        words = stage_words(stage.phase, stage.detail, run.plan)
        role = "strong" if stage.running else ""
        room = max(0, width - clock - 5)
        lines.append([mark, Span(left(words, room), role), Span(" " + right(times[n - 1], clock))])
    told = "the loss follows with the first steps" if live else "no loss was logged"
    return [*lines[-max(0, height - 2) :], [], [Span(fit(f" {told}", width), "dim")]][:height]


def small_charts(width: int, height: int, others: int) -> tuple[int, int]:
    """How many charts stand under the large one, and how many rows they take."""
    if height < LARGE_ROWS + SMALL_ROWS or others <= 0:
        return 0, 0
    count = min(others, (width + GAP) // (SMALL_CELLS + GAP))
    return count, max(SMALL_ROWS, min(height * 2 // 5, MOST_SMALL_ROWS)) if count else 0


class LineChart(Painted):
    """A large chart with a title row, and small ones in a row under it."""

    _view: RunView = RunView()

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._axes: dict[str, Axes] = {}
        """The axes last drawn, by the chart's name."""

    def show(self, view: RunView) -> None:
        before, now = self._view.snapshot, view.snapshot
        if before is None or now is None or before.id != now.id:
            self._axes = {}
        self._view = view
        self.repaint()

    def on_click(self, event: events.Click) -> None:
        """A click on a small chart makes it the large one; on the large one, the next."""
        run, size = self._view.snapshot, self.content_size
        if run is None or not run.train.steps:
            return
        event.stop()
        count, rows = small_charts(size.width, size.height, len(charts_of(self._view)) - 1)
        places = 1
        if count and event.y >= size.height - rows:
            places += min(count - 1, event.x * count // max(1, size.width))
        self.app.call_later(self.screen.run_action, f"chart({places})")

    def draw(self, width: int, height: int) -> list[Line]:
        view, run = self._view, self._view.snapshot
        if run is None:
            return [rule("loss", width)]
        if not run.train.steps:
            title = legend(run, False, width)
            return [title, *start_lines(run, view.live, width, height - 1)]
        charts = charts_of(view)
        index = view.chart % len(charts)
        count, rows = small_charts(width, height, len(charts) - 1)
        large, others = charts[index], [*charts[index + 1 :], *charts[:index]][:count]
        log = is_logarithmic(large, view)
        if large.name == LOSS:
            title = legend(run, log, width)
        else:
            title = _title(large, log, width, f"{index + 1} of {len(charts)}")
        lines = [title, *self._plotted(run, large, log, width, height - rows - 1)]
        if not others:
            return lines
        cells = (width - GAP * (count - 1)) // count
        below: list[Line] = []
        for n, chart in enumerate(others):
            log = chart.logarithmic
            drawn = [_title(chart, log, cells), *self._plotted(run, chart, log, cells, rows - 1)]
            split = n * (cells + GAP) - GAP
            below = columns(below, drawn, GAP, split) if n else drawn
        return [*lines, *below]

    def _plotted(
        self, run: RunSnapshot, chart: Chart, log: bool, width: int, height: int
    ) -> list[Line]:
        view = self._view
        axes = choose_axes(
            chart.series,
            total=run.facts.total_steps,
            logarithmic=log,
            recent=view.recent,
            previous=self._axes.get(chart.name),
        )
        self._axes[chart.name] = axes
        marks: tuple[float, ...] = ()
        if run.facts.steps_per_epoch:
            ends = range(run.facts.steps_per_epoch, int(axes.x_high), run.facts.steps_per_epoch)
            marks = tuple(float(end) for end in ends[:200])
        return plot(
            chart.series,
            axes,
            width,
            height,
            glyphs="ascii" if self.ascii_only else view.glyphs,
            marks=marks,
            baseline=chart.baseline,
        )


def _title(chart: Chart, logarithmic: bool, width: int, note: str = "") -> Line:
    """The chart's name and its last exact value."""
    line: Line = [Span(f" {fit(chart.name, width - len(chart.last) - 3)} ", "title")]
    line.append(Span(chart.last, "strong"))
    if logarithmic and width_of(line) + 5 <= width:
        line.append(Span("  log", "dim"))
    room = width - width_of(line) - (len(note) + 1 if note else 0)
    if room > 2:
        line.append(Span(" " + "─" * (room - 1), "dim"))
        line.append(Span(f" {note}" if note else "", "dim"))
    return line
