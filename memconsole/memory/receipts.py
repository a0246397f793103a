"""Estimates calibrated by finished runs: what earlier runs of the same setup measured corrects and narrows.

A setup is a device with its memory, driver and framework versions, and everything of a plan but its sizes of
batch and length. Its estimates are off by one unknown factor; with n runs measured, the logarithm of that
factor has a normal posterior (Gelman et al., Bayesian Data Analysis, 3rd ed., section 2.5): the prior is the
band an estimate has without any run, the noise what runs of one setup differ by. Nothing is taken over from
other setups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from memconsole.memory.table import MemoryTable, Tier
from memconsole.plan.plan import Plan, PlanError

NOISE = 0.02
"""Least standard deviation of the log ratio between runs of one setup."""
DECILE = 1.2815515655446004
"""Standard deviations between the median of a normal distribution and its 10th or 90th percentile."""

Price = Callable[[Plan], MemoryTable]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished run measured, from its receipt."""

    plan: Plan
    device_name: str
    device_total_bytes: int | None
    driver: str | None
    versions: dict[str, str]
    peak_bytes: int
    """Live tensor bytes at the peak."""


class Machine(msgspec.Struct, frozen=True):
    """Where a plan would run now: runs measured elsewhere say nothing."""

    device_name: str
    versions: dict[str, str]
    driver: str | None = None


def calibrated(
    table: MemoryTable, plan: Plan, machine: Machine, runs: Iterable[Measured], price: Price
) -> MemoryTable:
    """`table` with its peak corrected by the runs of its setup, and its band narrowed; as it is without any.

    `price` gives the table of an earlier plan as it is estimated today, so that runs of earlier versions
    of the formulas count.
    """
    setup = setup_of(plan)
    ratios = []
    for run in runs:
        if setup_of(run.plan) != setup or not _same_machine(run, machine):
            continue
        try:
            ratios.append(math.log(run.peak_bytes / price(run.plan).peak_bytes))
        except (PlanError, ValueError, ZeroDivisionError):
            continue
    if not ratios:
        return table
    base = table.formula or table  # what earlier plans are priced by
    low, high = base.band_bytes
    factor, spread = posterior(ratios, math.log(high / low) / (2 * DECILE))
    peak, reserved = int(base.peak_bytes * factor), int(base.reserved_bytes * factor)
    device = base.device_bytes + reserved - base.reserved_bytes
    edge = math.exp(DECILE * spread)
    count = f"{len(ratios)} measured run{'s' if len(ratios) > 1 else ''} of this setup"
    return msgspec.structs.replace(
        table,
        tier=Tier.CALIBRATED,
        peak_bytes=peak,
        reserved_bytes=reserved,
        device_bytes=device,
        host_bytes=table.host_bytes + (peak - table.peak_bytes if on_cpu(table) else 0),
        reserved_tier=Tier.CALIBRATED,
        device_tier=Tier.CALIBRATED if on_cpu(table) else table.device_tier,
        band_bytes=(int(device / edge), int(device * edge)),
        band_from=count,
    )


def posterior(log_ratios: list[float], prior_deviation: float) -> tuple[float, float]:
    """The factor that estimates of a setup are off by, and the deviation of the next run's logarithm from it.

    The prior of the factor's logarithm is centred on 0. The noise is what the runs differ by, where that is
    more than `NOISE`.
    """
    n = len(log_ratios)
    mean = sum(log_ratios) / n
    scatter = sum((x - mean) ** 2 for x in log_ratios) / max(1, n - 1)
    noise = max(NOISE**2, scatter)
    precision = n / noise + 1 / max(prior_deviation, 1e-9) ** 2
    return math.exp(n * mean / noise / precision), math.sqrt(1 / precision + noise)


def setup_of(plan: Plan) -> tuple[object, ...]:
    """Everything of a plan that selects what its step does, but for the sizes of batch and length."""
    o = plan.optimize
    return (
        plan.backend,
        plan.model,
        plan.data.vocab_size,
        plan.data.tokenizer,
        msgspec.structs.replace(o, accumulation_steps=min(2, o.accumulation_steps)),
    )


def on_cpu(table: MemoryTable) -> bool:
    return table.budget.kind == "cpu"


def _same_machine(run: Measured, machine: Machine) -> bool:
    shared = set(run.versions) & set(machine.versions)
    return (
        run.device_name == machine.device_name
        and (run.driver is None or machine.driver is None or run.driver == machine.driver)
        and bool(shared)
        and all(run.versions[name] == machine.versions[name] for name in shared)
    )
