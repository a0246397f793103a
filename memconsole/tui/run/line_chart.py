"""The loss curve: training as a line, validation as marks, the best baseline as a dotted line."""

from __future__ import annotations

from memconsole.plan.tasks import task_of
from memconsole.runs.read.figures import baseline_of, figures
from memconsole.runs.read.snapshot import RunSnapshot
from memconsole.runs.read.stages import stage_words
from memconsole.tui.draw.chart import Axes, Series, choose_axes, plot
from memconsole.tui.draw.ink import Line, Span, fit, left, right, rule, width_of
from memconsole.tui.draw.words import loss_word, measure_word, state_mark
from memconsole.tui.run.header import clock_word
from memconsole.tui.views.run_view import RunView
from memconsole.tui.widgets.painted import Painted
from memconsole.units import format_duration


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
    line: Line = [Span(" loss ", "title")]
    line.append(
        Span(f"─ train {loss_word(run.facts.loss) if run.facts.loss is not None else '—'}", "train")
    )
    if run.evaluations:
        last = run.evaluations[-1]
        line.append(Span(f"  ◆ {validation} {loss_word(last.loss)}", "validation"))
    task = task_of(run.plan)
    baseline = baseline_of(task, run.evaluations)
    if baseline is not None and with_baseline:
        text = f"  ┄ {baseline.measure.name} {measure_word(baseline.value)}"
        line.append(Span(text, "baseline"))
    if logarithmic:
        line.append(Span("  log", "dim"))
    for found in figures(task, run.evaluations[-1]) if run.evaluations else ():
        word = f"  {measure_word(found.value)} {found.measure.name}"
        if not found.baseline and len(word) <= width - width_of(line):  # never cut
            line.append(Span(word, "validation"))
    return line


def start_lines(run: RunSnapshot, live: bool, width: int, height: int) -> list[Line]:
    """In place of an empty chart: the stages of the start-up, each with its time."""
    lines: list[Line] = [[]]
    for n, stage in enumerate(run.stages, 1):
        mark = Span(" ● ", "accent") if stage.running else Span(" ✓ ", "good")
        if n == len(run.stages) and not live and not run.facts.step:
            mark = Span(f" {state_mark(run)[0]} ", state_mark(run)[1])  # where it ended
        took = clock_word(stage.seconds) if stage.running else format_duration(stage.seconds)
        words = stage_words(stage.phase, stage.detail, run.plan)
        role = "strong" if stage.running else ""
        lines.append([mark, Span(left(words, max(0, width - 16)), role), Span(right(took, 11))])
    told = "the loss follows with the first steps" if live else "no loss was logged"
    return [*lines[-max(0, height - 2) :], [], [Span(fit(f" {told}", width), "dim")]][:height]


class LineChart(Painted):
    """One title row and the plot."""

    _view: RunView = RunView()
    _axes: Axes | None = None

    def show(self, view: RunView) -> None:
        before, now = self._view.snapshot, view.snapshot
        if before is None or now is None or before.id != now.id:
            self._axes = None
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        run = self._view.snapshot
        if run is None:
            return [rule("loss", width)]
        view = self._view
        recent = view.recent and bool(run.recent_train.steps)
        train = Series((run.recent_train if recent else run.train).points, "train")
        series = (train, Series(run.validation.points, "validation", marker="◆"))
        baseline = baseline_of(task_of(run.plan), run.evaluations)
        axes = choose_axes(
            series,
            total=run.facts.total_steps,
            logarithmic=view.logarithmic,
            recent=recent,
            previous=self._axes,
        )
        self._axes = axes
        marks: tuple[float, ...] = ()
        if run.facts.steps_per_epoch:
            ends = range(run.facts.steps_per_epoch, int(axes.x_high), run.facts.steps_per_epoch)
            marks = tuple(float(end) for end in ends[:200])
        title = legend(run, view.logarithmic, width)
        if not train.points:
            return [title, *start_lines(run, view.live, width, height - 1)]
        return [
            title,
            *plot(
                series,
                axes,
                width,
                height - 1,
                glyphs=self._glyphs(),
                marks=marks,
                baseline=None if baseline is None else baseline.value,
            ),
        ]

    def _glyphs(self) -> str:
        return "ascii" if self.ascii_only else self._view.glyphs
