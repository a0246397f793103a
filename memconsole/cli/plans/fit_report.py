"""The report of `memconsole fit`: the fitted plan, notes on it, and the largest and smallest sizes that work."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from memconsole.devices.planned import catalog_budgets
from memconsole.memory.answers.advice import (
    Largest,
    largest_micro_batch,
    largest_sequence_length,
)
from memconsole.memory.answers.cards import Price, needed
from memconsole.memory.answers.solve import (
    Faster,
    Fit,
    faster,
    smallest_device,
    smallest_device_fitted,
)
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan as plans
from memconsole.plan.differences import differing
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole.plan.toggles.sharding import MEANINGS
from memconsole.plan.training import recipe
from memconsole.plan.training.origin import frozen_at_random, refused_base


class FitReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `memconsole fit` tells of a plan."""

    given: Plan
    fit: Fit
    kept: frozenset[str]
    """The settings that were left as they are."""
    notes: tuple[str, ...]
    largest_micro_batch: tuple[Largest | None, Largest | None]
    """For the plan as given, and for the fitted plan."""
    largest_sequence_length: tuple[Largest | None, Largest | None]
    smallest_device: str | None
    """The smallest catalog device for the plan as given."""
    smallest_device_fitted: str | None
    """The same, with the plan fitted to each device at the same result."""
    faster: Faster | None
    """A faster plan that more changes of the result would allow."""
    pace: float
    """Seconds of a step that runs on this machine measured, divided by the estimate."""


def fit_report(
    plan: Plan,
    fit: Fit,
    kept: frozenset[str],
    notes: tuple[str, ...],
    price: Price,
    *,
    devices: int,
    devices_here: int,
    pace: float,
) -> FitReport:
    """The report on the `fit` of `plan`, which was searched for with at most `devices` devices. This machine has
    `devices_here` of them."""
    device, fitted = fit.after.budget, fit.plan
    budgets = catalog_budgets(plan)
    return FitReport(
        given=plan,
        fit=fit,
        kept=kept,
        notes=(*notes, *_device_notes(fit, devices_here), *_plan_notes(plan, fit)),
        largest_micro_batch=(
            largest_micro_batch(plan, device, price),
            largest_micro_batch(fitted, device, price),
        ),
        largest_sequence_length=(
            largest_sequence_length(plan, device, price),
            largest_sequence_length(fitted, device, price),
        ),
        smallest_device=smallest_device(plan, budgets),
        smallest_device_fitted=smallest_device_fitted(
            plan, budgets, kept, allow=frozenset(fit.allowed)
        ),
        faster=faster(plan, device, fit, kept, price, devices),
        pace=pace,
    )


def _device_notes(fit: Fit, devices_here: int) -> Iterator[str]:
    """What a fitted plan on several devices means; or, if no settings fit, on how many devices they would."""
    count, device = fit.plan.device.count, fit.after.budget
    if fit.fits and count > 1:
        sharding = fit.plan.optimize.sharding
        yield (
            f"{sharding} on {count:,} devices: {MEANINGS[sharding]}; {fit.plan.effective_batch:,} rows per step as before"
        )
        if device.local and count > devices_here:
            yield f"this machine has {devices_here:,} of these devices with as much free memory"
    needs = None if fit.fits else needed(fit.plan, fit.after)
    if needs is not None:
        yield f"what needs least {needs.words}"


def _plan_notes(plan: Plan, fit: Fit) -> Iterator[str]:
    """What a person should know of the fitted plan."""
    device, fitted = fit.after.budget, fit.plan
    if fitted.optimize.compile:
        torch = fitted.backend == "torch"
        yield "the first steps compile" if torch else "each block is compiled at the start"
    yield from filter(None, [frozen_at_random(fitted), refused_base(fitted)])
    for row in OPTIMIZATIONS:
        refusal = row.refusal(fitted, kind=device.kind)
        if refusal:
            yield f"kept: {refusal}"
    if kept_rate := recipe.kept_rate(plan, fitted):
        yield kept_rate
    if fit.after.verdict is Verdict.TIGHT:
        yield "tight: no settings leave room for the whole band"
    if fit.only_tight is not None:
        yield only_tight_note(plan, fit.only_tight)


def only_tight_note(plan: Plan, tight: Plan) -> str:
    """A note on a plan that changes the result less, but is tight."""
    changes = differing([plan, tight])
    settings = ", ".join(f"{key} = {plans.written(value)}" for key, (_, value) in changes.items())
    return f"with less change of the result, but tight: {settings or 'the plan as given'}"
