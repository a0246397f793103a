"""The chosen model, data, device, backend and training settings: one row each, with its key."""

from __future__ import annotations

from rich.cells import cell_len

from memconsole.plan import catalog
from memconsole.plan.mixture import parts
from memconsole.plan.origin import shortly
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.recipe import learning_rate
from memconsole.plan.tasks import task_of
from memconsole.tui.draw.ink import Line, Span, fit, left
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.widgets.painted import Painted
from memconsole.units import format_bytes, format_count

ROWS = 5


def summary_lines(view: PlanView, width: int) -> list[Line]:
    """Five rows. Pure in `view`."""
    plan, found = view.plan, view.estimate
    weights = shortly(plan)
    model = f"{_name(plan)} · {weights}" if weights else plan.model.name
    if found is not None:
        mark = "~" if view.stale else ""
        model += f" · {mark}{format_count(found.parameters)} parameters"
        if found.trainable_parameters != found.parameters:
            model += f", {format_count(found.trainable_parameters)} trained"
    elif plan.model.target_params:
        model += f" · about {format_count(plan.model.target_params)} parameters"
    device = plan.device.name
    if plan.device.count > 1:
        device += f" × {plan.device.count}"
    if plan.launch.on == "slurm":
        device += f" · a Slurm job{f' in {plan.launch.partition}' if plan.launch.partition else ''}"
    if found is not None:
        budget = found.table.budget
        if budget.name != plan.device.name:
            device += f" → {budget.name}"
        if not budget.local:
            device += " · catalog"
        device += f" · {format_bytes(budget.total_bytes)} {budget.memory_label}"
    train = plan.train
    length = f"{train.max_steps:,} steps" if train.max_steps else f"{train.epochs} epochs"
    rows = (
        ("model", "model", model),
        (
            "data",
            "data",
            f"{_data(plan)} · {plan.data.sequence_length:,} {task_of(plan).positions}/row",
        ),
        ("device", "device", device),
        ("backend", "backend", plan.backend),
        (
            "settings",
            "train",
            f"{length} · {plan.effective_batch:,} rows/step · {_rate(plan)}",
        ),
    )
    keys = [view.keys.shown("plan", id) for id, _, _ in rows]
    most = max(map(cell_len, keys))
    return [
        [
            Span(f" {left(key, most)} ", "key"),
            Span(f"{name:<8}", "dim"),
            Span(fit(text, width - 10 - most), "strong"),
        ]
        for key, (_, name, text) in zip(keys, rows, strict=True)
    ]


def _name(plan: Plan) -> str:
    """The model's name; of a directory the last part, which tells it apart where there is little room."""
    name = plan.model.name
    return name.rstrip("/").rpartition("/")[2] if catalog.model_directory(plan) else name


def _rate(plan: Plan) -> str:
    """The learning rate; marked where it follows other settings."""
    if plan.train.learning_rate is not None:
        return f"lr {plan.train.learning_rate:g}"
    try:
        return f"lr {learning_rate(plan):g} (auto)"
    except PlanError:  # the estimate says what is wrong with it
        return "lr (auto)"


def _data(plan: Plan) -> str:
    """The source, with its share and the number of others if it is mixed."""
    try:
        first, *others = parts(plan)
    except PlanError:  # the estimate says what is wrong with it
        return plan.data.source
    return (
        f"{plan.data.source} {first.share:.0%} + {len(others)} more" if others else plan.data.source
    )


class PlanSummary(Painted):
    """The top left of the plan screen."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return summary_lines(self._view, width) if self._view else []
