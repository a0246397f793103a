"""Corrects the estimated time of a step with finished runs of the device, which had as many CPU threads.

Each run gives one ratio: its measured time divided by its estimated time.

- Runs of the plan's own setup correct the estimate in full, by their median ratio. Without such runs, those that differ in
  optimizations alone do.
- Without these, those of the plan's model with other data settings are used; without any of the model, those of other
  setups of the backend. They are weighted by the size of their models. A model with a
  tenth to ten times the parameters counts as one run. Outside this range the weight falls, to zero at a hundredth and at a
  hundred times. The weighted median of the ratios is used, so that several runs outvote one. It is limited to a factor of
  two for each run counted, because the machine may have been busy during one of them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable

import msgspec

from memconsole.memory.answers.receipts import Machine, Measured, kin_of, same_machine, setup_of
from memconsole.memory.table import Estimate, Tier
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, PlanError

MOST_BY_ONE = 2.0
"""The largest factor, either way, by which one run of another setup corrects a plan."""

Seconds = Callable[[Plan], float]
"""Estimates the seconds of a plan's step, by formula."""
Size = Callable[[Plan], int]
"""The number of parameters of a plan's model."""


class Slowdown(msgspec.Struct, frozen=True):
    """How much slower the steps of a plan are than estimated."""

    factor: float
    """Multiplies the estimated time of a step."""
    measured: bool
    """Whether runs of the plan's setup, or of setups with other optimizations, measured it. Otherwise it is borrowed from
    other plans."""


def slowdown(
    plan: Plan, machine: Machine, runs: Iterable[Measured], seconds: Seconds, size: Size
) -> Slowdown | None:
    """How much slower the steps of `plan` are than estimated; None if no run can be used."""
    known = [
        run
        for run in runs
        if run.step_seconds
        and run.plan.backend == plan.backend
        and run.plan.device.count == plan.device.count
        and run.plan.device.threads == plan.device.threads
        and same_machine(run, machine)
    ]
    kin = [run for run in known if kin_of(run.plan) == kin_of(plan)]
    own = [run for run in kin if setup_of(run.plan) == setup_of(plan)] or kin
    of_model = [run for run in known if run.plan.model == catalog.with_sizes(plan).model]
    told = []
    for run in own or of_model or known:
        try:
            told.append(((run.step_seconds or 1.0) / seconds(run.plan), size(run.plan)))
        except (PlanError, ValueError, ZeroDivisionError):
            continue
    if own and told:
        return Slowdown(statistics.median(factor for factor, _ in told), measured=True)
    factor = _borrowed(told, size(plan)) if told else None
    return None if factor is None else Slowdown(factor, measured=False)


def _borrowed(told: list[tuple[float, int]], parameters: int) -> float | None:
    """The factor for a model of `parameters` parameters, from (factor, parameters) of runs of other setups."""
    weighed = [(math.log(factor), likeness(each, parameters)) for factor, each in told]
    counted = sorted((value, weight) for value, weight in weighed if weight)
    if not counted:
        return None
    total = sum(weight for _, weight in counted)
    limit = math.log(MOST_BY_ONE) * total
    return math.exp(max(-limit, min(limit, _weighted_median(counted))))


def likeness(parameters: int, others: int) -> float:
    """1 for two models whose sizes differ by at most a factor of ten, 0 from a hundred on."""
    return max(0.0, min(1.0, 2 - abs(math.log10(max(1, parameters) / max(1, others)))))


def _weighted_median(ordered: list[tuple[float, float]]) -> float:
    """The weighted median of sorted (value, weight) pairs; the mean of two values if the weight splits between them."""
    half = sum(weight for _, weight in ordered) / 2
    upto = list(itertools.accumulate(weight for _, weight in ordered))
    low = next(n for n, weight in enumerate(upto) if weight >= half * (1 - 1e-9))
    high = next(n for n, weight in enumerate(upto) if weight > half * (1 + 1e-9))
    return (ordered[low][0] + ordered[high][0]) / 2


def paced(found: Estimate, by: Slowdown) -> Estimate:
    """`found` with every step time multiplied by the factor of `by`. The start of a run is not changed."""
    factor = by.factor
    minutes, whole = found.epoch_minutes, found.run_seconds
    more = (found.run_steps or 0) * found.step_seconds * (factor - 1)
    return msgspec.structs.replace(
        found,
        step_seconds=found.step_seconds * factor,
        tokens_per_second=found.tokens_per_second / factor,
        epoch_minutes=None if minutes is None else minutes * factor,
        run_seconds=None if whole is None else whole + more,
        time_tier=Tier.CALIBRATED if by.measured else found.time_tier,
        time_from="by runs here" if by.measured else "by other runs",
    )
