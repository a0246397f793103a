"""What a run's records say is going wrong, and the settings that act on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean, stdev

from memconsole.plan.check import check
from memconsole.plan.plan import DataChoice, Plan, PlanError, replace
from memconsole.plan.tasks import task_of
from memconsole.plan.training import recipe
from memconsole.runs.read.shown.snapshot import Help, Symptom
from memconsole.runs.read.state.figures import baseline_of
from memconsole.runs.read.state.pace import data_wait_share
from memconsole.runs.read.state.reduce import RunState
from memconsole.units import format_measure

MUCH_WAITING = 0.2
"""Share of a step spent waiting for data from which the run is reported as waiting for data."""
ENOUGH_STEPS = 100
"""Steps after the warm-up before a loss can be called flat."""
ENOUGH_POINTS = 16
"""Points of the loss curve in each of the two halves that are compared."""
NO_BETTER = 0.98
"""A validation loss above this share of the best baseline is no better than the baseline."""
RISING_EVALUATIONS = 3
"""Evaluations in a row above the best one that make a rise."""
RISE, GAP = 1.02, 1.1
"""A rise is at least this many times the best validation loss, and at least this many times the
training loss."""


def symptoms_of(plan: Plan, state: RunState) -> tuple[Symptom, ...]:
    """The symptoms of a live or ended run."""
    found = (waits_for_data(plan, state), not_learning(plan, state), overfitting(plan, state))
    return tuple(symptom for symptom in found if symptom is not None)


def waits_for_data(plan: Plan, state: RunState) -> Symptom | None:
    """The trainer spends much of a step waiting for its next batch."""
    share = data_wait_share(state)
    if share is None or share <= MUCH_WAITING:
        return None
    helps = []
    if plan.data.streaming and "data.streaming" not in task_of(plan).not_applicable(plan):
        helps.append(Help({"data.streaming": False}, "tokens stay in memory: read and made once"))
        if not plan.data.cache_gib:
            kept = {"data.cache_gib": DataChoice().cache_gib}
            helps.append(Help(kept, "tokens are made once, and read from disk in later epochs"))
    else:
        larger = {"train.batch_size": 2 * plan.train.batch_size}
        helps.append(Help(larger, "half as many batches to hand over; each step is larger"))
        reads_ahead = plan.data.streaming or task_of(plan).name != "language"
        if reads_ahead and plan.data.shuffle_buffer < DataChoice().shuffle_buffer:
            longer = {"data.shuffle_buffer": DataChoice().shuffle_buffer}
            helps.append(Help(longer, "more rows are read ahead"))
    words = f"{share * 100:.0f} % of a step is spent waiting for data"
    return Symptom("waits_for_data", words, _accepted(plan, helps))


def not_learning(plan: Plan, state: RunState) -> Symptom | None:
    """The training loss is flat and the validation loss no better than a trivial model's."""
    baseline = baseline_of(task_of(plan), state.evaluations)
    last = state.evaluations[-1].loss if state.evaluations else None
    if baseline is None or last is None or last < NO_BETTER * baseline.value:
        return None
    if not _flat(plan, state):
        return None
    rate = recipe.learning_rate(plan)
    helps = [
        Help({"train.learning_rate": _rounded(rate * 3)}, "larger steps, if the loss hardly moves"),
        Help({"train.learning_rate": _rounded(rate / 3)}, "smaller steps, if the loss jumps"),
    ]
    if plan.data.streaming and plan.data.shuffle_buffer:
        wider = {"data.shuffle_buffer": plan.data.shuffle_buffer * 5}
        helps.append(Help(wider, "more mixing, if neighbouring rows are alike"))
    words = (
        f"not learning: validation loss {format_measure(last)} after {state.step:,} steps is no better than the "
        f"{baseline.measure.label} ({format_measure(baseline.value)}), and the training loss is flat"
    )
    return Symptom("not_learning", words, _accepted(plan, helps))


def overfitting(plan: Plan, state: RunState) -> Symptom | None:
    """The validation loss rises while the training loss stays below it: that of training rows which the last
    evaluation measured in the same way, or else that of the last steps."""
    judged = [(e.step, e.loss) for e in state.evaluations if e.loss is not None]
    measured = state.evaluations[-1].train_loss if state.evaluations else None
    trained = state.loss if measured is None else measured
    if not judged or trained is None:
        return None
    best_step, best = min(judged, key=lambda pair: pair[1])
    after = [loss for step, loss in judged if step > best_step]
    last = judged[-1][1]
    apart = last > GAP * trained if trained > 0 else False
    if len(after) < RISING_EVALUATIONS or last < RISE * best or not apart:
        return None
    helps = []
    if not plan.train.early_stopping_patience:
        patience = {"train.early_stopping_patience": RISING_EVALUATIONS}
        helps.append(Help(patience, "end at the best; a resumed run may change it"))
    if plan.data.max_examples is not None:
        helps.append(Help({"data.max_examples": None}, "train on all of the data"))
    more = recipe.most_decay(plan.optimize.optimizer)
    if recipe.weight_decay(plan) < more:
        helps.append(Help({"train.weight_decay": more}, "keep weights small"))
    if plan.model.target_params is not None:
        fewer = {"model.target_params": plan.model.target_params // 2}
        helps.append(Help(fewer, "a smaller model memorizes less"))
    words = (
        f"overfitting: validation loss {format_measure(last)}, best {format_measure(best)} at step {best_step:,}, while the "
        f"training loss is {format_measure(trained)}"
    )
    return Symptom("overfitting", words, _accepted(plan, helps))


def _flat(plan: Plan, state: RunState) -> bool:
    """Whether the training loss of the last half of the steps did not fall: its second half is not
    lower than its first by two standard errors of the difference."""
    warmup = recipe.warmup_steps(plan, state.total_steps or state.step)
    if state.step < warmup + ENOUGH_STEPS:
        return False
    begin = max(warmup, state.step // 2)
    points = zip(state.train.steps, state.train.values, strict=False)
    values = [loss for step, loss in points if step > begin]
    half = len(values) // 2
    if half < ENOUGH_POINTS:
        return False
    first, second = values[:half], values[half:]
    error = (stdev(first) ** 2 / len(first) + stdev(second) ** 2 / len(second)) ** 0.5
    return bool(fmean(first) - fmean(second) < 2 * error)


def _accepted(plan: Plan, helps: list[Help]) -> tuple[Help, ...]:
    """The changes that apply to the plan's task and after which the plan can still be trained."""
    unused: Mapping[str, str] = task_of(plan).not_applicable(plan)

    def usable() -> Iterator[Help]:
        for one in helps:
            if not unused.keys().isdisjoint(one.changes):
                continue
            try:
                check(replace(plan, one.changes))
            except PlanError:
                continue
            yield one

    return tuple(usable())


def _rounded(value: float) -> float:
    """Two significant digits."""
    return float(f"{value:.1e}")
