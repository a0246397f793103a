"""The table of epochs: train and validation loss and minutes, newest last."""

from __future__ import annotations

from memconsole.runs.read.shown.words import NOTHING_LEARNED
from memconsole.tui.draw.lines import Line, Span, right, rule
from memconsole.tui.draw.words import loss_word, minutes_word
from memconsole.tui.views.run_view import RunView
from memconsole.tui.widgets.painted import Painted


def epoch_lines(view: RunView, width: int, height: int) -> list[Line]:
    """A rule, a head, one row per epoch (the last ones), then the mean. Pure in `view`."""
    run = view.snapshot
    if run is None:
        return [rule("epochs", width)]
    expected = view.prediction.epoch_minutes if view.prediction else None
    note = f"~{minutes_word(expected)} min predicted" if expected is not None else ""
    lines = [rule("epochs", width, note)]
    cells = max(6, (width - 7) // 3)
    lines.append(_head(cells))
    epochs = run.epochs
    if not epochs:
        words = f"epoch {run.facts.epoch or 1} is running" if view.live else "no epoch was finished"
        if run.state == "queued":
            words = "no epoch has begun"
        return [*lines, [Span(f" {words}", "dim")]][:height]
    room = max(1, height - 2 - (1 if len(epochs) > 1 else 0))
    for epoch in epochs[-room:]:
        lines.append(
            [
                Span(right(f"{epoch.epoch}", 6)),
                Span(right(loss_word(epoch.train_loss, NOTHING_LEARNED), cells), "train"),
                Span(right(loss_word(epoch.validation_loss), cells), "validation"),
                Span(right(minutes_word(epoch.minutes), cells)),
            ]
        )
    average = run.average_epoch_minutes
    if len(epochs) > 1 and average is not None:
        lines.append(
            [
                Span(right("mean", 6), "dim"),
                Span(" " * (2 * cells)),
                Span(right(minutes_word(average), cells), "strong"),
            ]
        )
    return lines[:height]


def _head(cells: int) -> Line:
    """The names of the columns. All but the first take `cells` cells."""
    validation = "validation" if cells > 10 else "valid." if cells > 6 else "val."
    names = ("train", validation, "minutes" if cells > 7 else "min")
    return [Span(right("epoch", 6), "dim"), *(Span(right(name, cells), "dim") for name in names)]


class EpochTable(Painted):
    """The bottom left of the run screen."""

    _view: RunView = RunView()

    def show(self, view: RunView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return epoch_lines(self._view, width, height)
