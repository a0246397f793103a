"""Which sources a plan trains and validates on: `data.source`, those of `data.mix`, and `data.validation`."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from memconsole.given_path import given_path
from memconsole.plan import catalog
from memconsole.plan.catalog.entries import DatasetEntry
from memconsole.plan.catalog.sources import HUB_PREFIX
from memconsole.plan.plan import DataChoice, Plan, PlanError, quote, replace

MIX, VALIDATION = "data.mix", "data.validation"
_ALONE = {MIX: None, VALIDATION: None}
_SPLIT = re.compile(r"\w+(\[[^\]]*\])?", re.ASCII)


class Part(NamedTuple):
    """One source of a mixture: the plan with that source alone, and its share of the rows."""

    plan: Plan
    share: float


def parts(plan: Plan) -> tuple[Part, ...]:
    """The sources that are trained on, `data.source` first. Raises `PlanError`."""
    if plan.data.mix is None and plan.data.validation is None:
        return (Part(plan, 1.0),)
    others = _others(plan.data.mix)
    if not others:
        return (Part(replace(plan, _ALONE), 1.0),)
    rest = 1.0 - math.fsum(share for _, share in others)
    if rest <= 1e-9:
        raise _error(
            MIX, plan.data.mix, f"leaves nothing for data.source = {quote(plan.data.source)}"
        )
    found = [(plan.data.source, rest), *others]
    return tuple(Part(replace(plan, {"data.source": s, **_ALONE}), share) for s, share in found)


def limit_words(plan: Plan) -> str:
    """What `data.max_examples` leaves of `data.source`; empty without it."""
    most = plan.data.max_examples
    return f", its first {most:,} examples" if most is not None else ""


def validation_plan(plan: Plan) -> Plan | None:
    """The plan with what `data.validation` names as its only source: a split of a hub dataset, or any other source.
    None if validation takes a share of what is trained on."""
    named = plan.data.validation
    if named is None:
        return None
    whole = {**_ALONE, "data.validation_fraction": 0.0, "data.max_examples": None}
    if validates_on_split(plan):
        return replace(plan, {**whole, "data.split": named})
    return replace(plan, {**whole, "data.source": named, "data.split": DataChoice().split})


def validates_on_split(plan: Plan) -> bool:
    """Whether `data.validation` names a split of the hub dataset that `data.source` names."""
    named, known = plan.data.validation, catalog.datasets()
    if named is None or named in known or not _SPLIT.fullmatch(named):
        return False
    source = plan.data.source
    return source.startswith(HUB_PREFIX) or (source in known and known[source].kind == "hub")


def sources(plan: Plan) -> tuple[Plan, ...]:
    """A plan for each source that is read, with that source alone: those of `parts`, then `validation_plan`. Raises
    `PlanError`."""
    held = validation_plan(plan)
    return (*(part.plan for part in parts(plan)), *([] if held is None else [held]))


def check_mixture(plan: Plan) -> None:
    """Raise `PlanError` if a source is not there, or two of them overlap."""
    if plan.data.mix is None and plan.data.validation is None:
        return
    trained = parts(plan)
    for i, part in enumerate(trained):
        entry = _entry(part.plan, MIX if i else "data.source")
        for other in trained[:i]:
            if _overlap(entry, part.plan, catalog.dataset(other.plan), other.plan):
                source = quote(part.plan.data.source)
                raise _error(MIX, plan.data.mix, f"{source} is mixed with itself")
    held = validation_plan(plan)
    if held is None:
        return
    entry = _entry(held, VALIDATION)
    for part in trained:
        if _overlap(entry, held, catalog.dataset(part.plan), part.plan):
            raise _error(
                VALIDATION,
                plan.data.validation,
                f"is part of data.source = {quote(part.plan.data.source)}, which is trained on; "
                "give other data, or leave it out to hold out data.validation_fraction",
            )


def _entry(plan: Plan, key: str) -> DatasetEntry:
    """The dataset of a plan with the source alone that the setting `key` names. Raises `PlanError`, which names `key`."""
    try:
        return catalog.dataset(plan)
    except PlanError as error:
        raise PlanError(str(error).replace("data.source =", f"{key} =", 1), key) from None


def _others(mix: str | None) -> list[tuple[str, float]]:
    """The sources of `data.mix` and their shares. Raises `PlanError`."""
    shares = []
    for word in (mix or "").split(","):
        if not word.strip():
            continue
        source, _, share = word.rpartition("=")
        try:
            number = float(share)
        except ValueError:
            number = math.nan
        if not source.strip() or not 0.0 < number < 1.0:
            raise _error(
                MIX,
                mix,
                f"expected SOURCE=SHARE with a share between 0 and 1, not {quote(word.strip())}",
            )
        shares.append((source.strip(), number))
    return shares


def _overlap(entry: DatasetEntry, plan: Plan, other: DatasetEntry, other_plan: Plan) -> bool:
    """Whether two sources share data, as far as their names tell."""
    if entry.kind == other.kind == "hub":
        same = (entry.where, entry.config) == (other.where, other.config)
        return same and _split(entry, plan) == _split(other, other_plan)
    if "hub" in (entry.kind, other.kind):
        return False
    a, b = (given_path(e.where).resolve() for e in (entry, other))
    return a == b or a in b.parents or b in a.parents


def _split(entry: DatasetEntry, plan: Plan) -> str:
    """The split of a hub dataset that a plan reads."""
    named = plan.data.split
    return named if named != DataChoice().split else entry.split or named


def _error(key: str, value: str | None, reason: str) -> PlanError:
    return PlanError(f"{key} = {quote(value)}: {reason}", key)
