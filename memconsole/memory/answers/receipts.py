"""Estimates calibrated by finished runs: what earlier runs of the same setup measured corrects and narrows.

A setup is a device with its memory, driver and framework versions, and everything of a plan but its sizes of
batch and length. Its estimates are off by one unknown factor; with n runs measured, the logarithm of that
factor has a normal posterior (Gelman et al., Bayesian Data Analysis, 3rd ed., section 2.5): the prior is the
band an estimate has without any run, the noise what runs of one setup differ by. Nothing is taken over from
other setups.

A run that ran out of memory did not measure its peak, but bounds it from below: its observation is censored, and
its likelihood is the normal distribution's upper tail (Gelman et al., section 8.7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from memconsole.memory.table import MemoryTable, Tier
from memconsole.plan.plan import Plan, PlanError

NOISE = 0.02
"""Least standard deviation of the log ratio between runs of one setup."""
POINTS = 400
"""Intervals of a quadrature over a setup's factor."""
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
    at_least: bool = False
    """The run died of memory: its peak would have been this or more."""


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
    ratios: list[float] = []
    bounds: list[float] = []
    for run in runs:
        if setup_of(run.plan) != setup or not _same_machine(run, machine):
            continue
        try:
            ratio = math.log(run.peak_bytes / price(run.plan).peak_bytes)
            (bounds if run.at_least else ratios).append(ratio)
        except (PlanError, ValueError, ZeroDivisionError):
            continue
    if not ratios and not bounds:
        return table
    base = table.formula or table  # what earlier plans are priced by
    low, high = base.band_bytes
    factor, spread = posterior(ratios, math.log(high / low) / (2 * DECILE), bounds)
    peak, reserved = int(base.peak_bytes * factor), int(base.reserved_bytes * factor)
    device = base.device_bytes + reserved - base.reserved_bytes
    edge = math.exp(DECILE * spread)
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
        band_from=_counted(len(ratios), len(bounds)),
    )


def posterior(
    log_ratios: list[float], prior_deviation: float, log_bounds: list[float] | None = None
) -> tuple[float, float]:
    """The factor that estimates of a setup are off by, and the deviation of the next run's logarithm from it.

    The prior of the factor's logarithm is centred on 0. The noise is what the runs differ by, where that is
    more than `NOISE`. `log_bounds` are of runs whose ratio was at least so much.
    """
    n = len(log_ratios)
    mean = sum(log_ratios) / max(1, n)
    scatter = sum((x - mean) ** 2 for x in log_ratios) / max(1, n - 1)
    noise = max(NOISE**2, scatter)
    precision = n / noise + 1 / max(prior_deviation, 1e-9) ** 2
    centre, variance = n * mean / noise / precision, 1 / precision
    if log_bounds:
        centre, variance = _above(centre, variance, log_bounds, noise)
    return math.exp(centre), math.sqrt(variance + noise)


def _above(
    centre: float, variance: float, log_bounds: list[float], noise: float
) -> tuple[float, float]:
    """Mean and variance of a normal posterior after censored observations, by quadrature."""
    deviation, blur = math.sqrt(variance), math.sqrt(noise)
    low = centre - 6 * deviation
    high = max(centre, *log_bounds) + 6 * max(deviation, blur)
    points = [low + (high - low) * k / POINTS for k in range(POINTS + 1)]
    logs = [
        -((x - centre) ** 2) / (2 * variance)
        + sum(_log_upper_tail((bound - x) / blur) for bound in log_bounds)
        for x in points
    ]
    most = max(logs)
    weights = [math.exp(value - most) for value in logs]
    total = sum(weights)
    mean = sum(w * x for w, x in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean) ** 2 for w, x in zip(weights, points, strict=True)) / total
    return mean, spread


def _log_upper_tail(z: float) -> float:
    """The logarithm of a standard normal's probability above `z` (Abramowitz and Stegun, 26.2.12 far out)."""
    if z < 25:
        return math.log(0.5 * math.erfc(z / math.sqrt(2)))
    return -z * z / 2 - math.log(z * math.sqrt(2 * math.pi))


def _counted(measured: int, died: int) -> str:
    """What a band comes from, as one phrase."""
    runs = f"{measured} measured run{'s' if measured > 1 else ''}" if measured else ""
    ended = f"{died} that ran out of memory" if measured else f"{died} out-of-memory run"
    if died > 1 and not measured:
        ended += "s"
    return " and ".join(part for part in (runs, ended if died else "") if part) + " of this setup"


def setup_of(plan: Plan) -> tuple[object, ...]:
    """Everything of a plan that selects what its step does, but for the sizes of batch and length."""
    o = plan.optimize
    return (
        plan.backend,
        plan.model,
        plan.data.vocab_size,
        plan.data.tokenizer,
        plan.data.isolate_documents,
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
