"""The chosen model, data, device, backend and training settings: one row each, with its key."""

from __future__ import annotations

from rich.cells import cell_len

from memconsole.memory.run_time import steps_are_known
from memconsole.plan import catalog
from memconsole.plan.data.left_out import left_out, left_out_shortly
from memconsole.plan.data.mixture import parts
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.tasks import task_of
from memconsole.plan.training.origin import NOT_HERE, frozen_at_random, origin, shortly
from memconsole.plan.training.recipe import learning_rate
from memconsole.tui.draw.lines import Line, Span, left, wrap
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.widgets.grown import Grown
from memconsole.units import format_bytes, format_count

MOST_ROWS = 3
"""The most rows of one text."""


def summary_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """Five rows, and as many more as long texts need. Pure in `view`."""
    plan = view.plan
    rows = (
        ("model", "model", _model(view)),
        ("data", "data", _data(plan)),
        ("device", "device", _device(view)),
        ("backend", "backend", (plan.backend,)),
        ("settings", "train", _train(view)),
    )  # fmt: skip
    keys = [view.keys.shown("plan", id) for id, _, _ in rows]
    most = max(map(cell_len, keys))
    lines: list[Line] = []
    for n, (key, (_, name, texts)) in enumerate(zip(keys, rows, strict=True)):
        cells = width - 10 - most
        text = next((text for text in texts if cell_len(text) <= cells), texts[-1])
        room = max(1, height - len(lines) - (len(rows) - 1 - n))
        head = [Span(f" {left(key, most)} ", "key"), Span(f"{name:<8}", "dim")]
        for part in wrap(text, cells, min(MOST_ROWS, room)):
            lines.append([*head, Span(part, "strong")])
            head = [Span(" " * (10 + most))]
    return lines[:height]


def _model(view: PlanView) -> tuple[str, ...]:
    """The model, where its weights come from, and its size; then the same in fewer words."""
    plan, priced = view.plan, view.priced
    weights = shortly(plan)
    name = f"{_name(plan)} · {_whole(plan, weights)}" if weights else plan.model.name
    if priced is None:
        target = plan.model.target_params
        return (f"{name} · about {format_count(target)} parameters" if target else name,)
    assumed = catalog.assumed_items(plan)
    name += f" · {assumed:,} items assumed" if assumed else ""
    size = ("~" if view.stale else "") + format_count(priced.parameters)
    used = ""
    if priced.active_parameters is not None:
        used = f", {format_count(priced.active_parameters)} a token"
    if priced.trainable_parameters != priced.parameters:
        used += f", {format_count(priced.trainable_parameters)} trained"
        return (f"{name} · {size} parameters{used}",)
    short = f"{name} · {size}"
    return f"{name} · {size} parameters{used}", short, short.replace(" · ", ", ")


def _train(view: PlanView) -> tuple[str, ...]:
    """How long it trains and at which rate; then the same in fewer words."""
    plan, train, estimate = view.plan, view.plan.train, view.estimate
    rate = _rate(plan)
    rows = f"{plan.effective_batch:,} rows"
    if plan.learns_pairs:
        rows = f"{plan.objective_name}, {plan.effective_batch // 2:,} pairs"
    rest = f", {rows}/step, {rate}"
    several = train.max_steps or train.epochs
    length = f"{several:,} {'step' if train.max_steps else 'epoch'}{'s' * (several > 1)}"
    short = f"{length}, {rows}, {rate}"
    shorter = length + rest, short, short.replace("(auto)", "auto"), short.removesuffix(" (auto)")
    steps = estimate.run_steps if estimate is not None and not view.stale else None
    if train.max_steps or steps is None:
        return shorter
    sign = "" if steps_are_known(plan) else "~"
    return f"{length} of {sign}{steps // train.epochs:,} steps{rest}", *shorter


def _device(view: PlanView) -> tuple[str, ...]:
    """The device and its memory; then the same in fewer words. The number of devices and the Slurm job are always shown."""
    plan, priced = view.plan, view.priced
    asked = plan.device.name
    if plan.device.count > 1:
        asked += f" × {plan.device.count}"
    if plan.launch.on == "slurm":
        asked += " · a Slurm job"
        asked += f" in {plan.launch.partition}" if plan.launch.partition else ""
    if priced is None:
        return (asked,)
    budget = priced.table.budget
    size = f" · {format_bytes(budget.total_bytes)}"
    named = f"{asked} → {budget.name}" if budget.name != plan.device.name else asked
    device = named + ("" if budget.local else " · catalog") + size
    if budget.local:
        return f"{device} {budget.memory_label}", device
    return f"{device} {budget.memory_label}", device, f"{asked} · catalog{size}", asked + size


def _whole(plan: Plan, weights: str) -> str:
    """Where weights come from; if they are not here, with the command that fetches them. Frozen random weights are named,
    because little is learned around them."""
    if frozen_at_random(plan):
        return "frozen weights random"
    return origin(plan).words if weights == NOT_HERE else weights


def _name(plan: Plan) -> str:
    """The model's name; for a directory its last part, which identifies it in little room."""
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


def _data(plan: Plan) -> tuple[str, ...]:
    """The source, with its share and the number of others if it is mixed, and what folders leave out; then the same in
    fewer words."""
    rows = f" · {plan.data.sequence_length:,} {task_of(plan).positions}/row"
    try:
        first, *others = parts(plan)
        files, few = left_out(plan), left_out_shortly(plan)
    except PlanError:  # the estimate says what is wrong with it
        return (plan.data.source + rows,)
    share = f" {first.share:.0%} + {len(others)} more" if others else ""
    words = plan.data.source + share + rows
    return (" · ".join((words, *files)), f"{words} · {few}") if files else (words,)


class PlanSummary(Grown):
    """The top left of the plan screen."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        return summary_lines(self._view, width, height) if self._view else []
