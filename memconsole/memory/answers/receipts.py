"""Calibrates estimates with finished runs: earlier runs of the same setup correct the peak and narrow the band.

A setup is a device with its memory, driver and framework versions, and a plan without its batch sizes and length. All
estimates of a setup are off by one unknown factor. After n runs the logarithm of that factor has a normal posterior
(Gelman et al., Bayesian Data Analysis, 3rd ed., section 2.5). The prior is the band of an estimate without runs.

A run tells less of a plan that is much larger or smaller than its own: its deviation grows with the logarithm of the ratio
of their estimates. The least of these deviations is common to all runs, so that more runs do not reduce it. Without runs of
its setup, a plan is corrected by those that differ in optimizations alone, as if they were its own, so that the difference
that an optimization makes stays as estimated. The band then has a further deviation of half the prior's. Other setups have no
influence.

The noise is the variation between runs of one setup. It cannot be estimated from one run, and poorly from a few, so its
variance has a prior too: the known scatter of runs on this kind of device, with the weight of `NOISE_RUNS` runs (a scaled
inverse chi-squared distribution, section 2.6).

A run that ran out of memory gives only a lower bound of its peak. Its observation is censored: the likelihood is the
normal distribution's upper tail (Gelman et al., section 8.7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from memconsole.memory.step_key import step_settings
from memconsole.memory.table import MemoryTable, Tier
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, PlanError

NOISE = 0.02
"""Standard deviation of the log ratio between runs of one setup where the framework counts its own tensors."""
NOISE_HEAP = 0.08
"""The same on a CPU whose heap keeps freed memory, because it packs tensors differently in each run. docs/estimates.md
lists the runs."""
NOISE_RUNS = 4
"""The weight of the prior noise, in runs, against the scatter of a setup's own runs."""
FAR = 0.05
"""Standard deviation of the log ratio of a run whose estimate differs from the plan's by a factor of e."""
POINTS = 400
"""Intervals of the quadrature over a setup's factor."""
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
    """True if the run ran out of memory: its peak would have been at least `peak_bytes`."""
    step_seconds: float | None = None
    """The typical seconds of a step; None if it took too few steps to tell."""


class Machine(msgspec.Struct, frozen=True):
    """The machine a plan would run on. Runs on other machines are not used."""

    device_name: str
    versions: dict[str, str]
    driver: str | None = None


class _Observations(msgspec.Struct, frozen=True):
    """What finished runs tell of a plan: measured peaks, divided by what the formula estimates for the runs' own plans."""

    ratios: list[float] = msgspec.field(default_factory=list)
    """Logarithms of the ratios."""
    deviations: list[float] = msgspec.field(default_factory=list)
    """For each ratio, the standard deviation that comes from the run being larger or smaller than the plan."""
    bounds: list[float] = msgspec.field(default_factory=list)
    """Lower bounds of log ratios, from runs that ran out of memory."""
    plans: list[Plan] = msgspec.field(default_factory=list)
    """The plans of all these runs."""


def _observe(runs: Iterable[Measured], price: Price, peak_bytes: int) -> _Observations:
    """The observations of `runs` for a plan whose peak is estimated at `peak_bytes`. Runs that cannot be priced are left
    out."""
    observed = _Observations()
    for run in runs:
        try:
            expected = price(run.plan).peak_bytes
            ratio = math.log(run.peak_bytes / expected)
            deviation = FAR * math.log(expected / peak_bytes)
        except (PlanError, ValueError, ZeroDivisionError):
            continue
        observed.plans.append(run.plan)
        if run.at_least:
            observed.bounds.append(ratio)
        else:
            observed.ratios.append(ratio)
            observed.deviations.append(deviation)
    return observed


def calibrated(
    table: MemoryTable, plan: Plan, machine: Machine, runs: Iterable[Measured], price: Price
) -> MemoryTable:
    """`table` with its peak corrected and its band narrowed by the runs of its setup, or else by those of setups that differ
    in optimizations alone (`kin_of`). Without such runs, `table` is returned unchanged.

    `price` estimates an earlier plan with the current formulas, so that runs made with older formulas count too.
    """
    setup, kind = setup_of(plan), table.budget.kind
    of_kin = [
        run for run in runs if kin_of(run.plan) == kin_of(plan) and same_machine(run, machine)
    ]
    of_setup = [run for run in of_kin if setup_of(run.plan) == setup]
    if not of_setup and table.formula is not None and not on_cpu(table):
        # Traced numbers tell more than other setups. What they are compared with may have a formula alone.
        formula = calibrated(table.formula, plan, machine, of_kin, price)
        return msgspec.structs.replace(table, formula=formula)
    base = table.formula or table  # earlier plans are priced by formula
    complete = [run for run in of_kin if not run.at_least]
    observed = _observe(of_setup or complete, price, base.peak_bytes)
    if not observed.plans:
        return table
    low, high = base.band_bytes
    prior = math.log(high / low) / (2 * DECILE)
    noise = NOISE_HEAP if on_cpu(table) and plan.optimize.heap != "tight" else NOISE
    factor, spread = posterior(observed.ratios, prior, observed.bounds, noise, observed.deviations)
    if not of_setup:
        spread = math.hypot(spread, prior / 2)
    peak, reserved = int(base.peak_bytes * factor), int(base.reserved_bytes * factor)
    device = base.device_bytes + reserved - base.reserved_bytes
    edge = math.exp(DECILE * spread)
    programs = programs_of(plan, kind)
    compiled = any(programs_of(earlier, kind) == programs for earlier in observed.plans)
    words = _band_words(len(observed.ratios), len(observed.bounds), kin=not of_setup)

    def corrected(table: MemoryTable) -> MemoryTable:
        host = table.host.compiled() if compiled else table.host
        added = table.devices_in_process * (peak - table.peak_bytes) if on_cpu(table) else 0
        changed: MemoryTable = msgspec.structs.replace(
            table,
            tier=Tier.CALIBRATED,
            peak_bytes=peak,
            reserved_bytes=reserved,
            device_bytes=device,
            host=host.more(added),
            reserved_tier=Tier.CALIBRATED,
            device_tier=Tier.CALIBRATED if on_cpu(table) else table.device_tier,
            band_bytes=(int(device / edge), int(device * edge)),
            band_from=words,
        )
        return changed

    whole = corrected(table)
    if table.formula is None:
        return whole
    # Tables of different tiers are compared by their formulas.
    return msgspec.structs.replace(whole, formula=corrected(table.formula))


def posterior(
    log_ratios: list[float],
    prior_deviation: float,
    log_bounds: list[float] | None = None,
    known_noise: float = NOISE,
    deviations: list[float] | None = None,
) -> tuple[float, float]:
    """The factor by which estimates of a setup are off, and the standard deviation of the next run's log ratio.

    The prior of the log factor is centred on 0. `log_bounds` are lower bounds of log ratios, from runs that ran out of
    memory. `deviations` are the runs' standard deviations in addition to the noise, 0 by default. The least of them is common
    to all runs, so that more runs do not reduce it.
    """
    n = len(log_ratios)
    mean = sum(log_ratios) / max(1, n)
    squares = sum((x - mean) ** 2 for x in log_ratios)
    noise = (NOISE_RUNS * known_noise**2 + squares) / (NOISE_RUNS + max(0, n - 1))
    variances = [deviation**2 for deviation in deviations or [0.0] * n]
    common = min(variances, default=0.0)
    weights = [1 / (noise + each - common) for each in variances]
    if n:
        mean = sum(w * x for w, x in zip(weights, log_ratios, strict=True)) / sum(weights)
    information = 1 / (common + 1 / sum(weights)) if n else 0.0
    precision = information + 1 / max(prior_deviation, 1e-9) ** 2
    centre, variance = information * mean / precision, 1 / precision
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
    """Log probability of a standard normal above `z` (for large z by Abramowitz and Stegun, 26.2.12)."""
    if z < 25:
        return math.log(0.5 * math.erfc(z / math.sqrt(2)))
    return -z * z / 2 - math.log(z * math.sqrt(2 * math.pi))


def _band_words(measured: int, out_of_memory: int, *, kin: bool) -> str:
    """The source of a band, as one phrase, from the numbers of runs that were measured and that ran out of memory. `kin`: the
    runs had other optimizations."""
    if kin:
        return f"{measured} measured run{'s' if measured > 1 else ''} with other optimizations"
    runs = f"{measured} measured run{'s' if measured > 1 else ''}" if measured else ""
    ended = (
        f"{out_of_memory} that ran out of memory"
        if measured
        else f"{out_of_memory} out-of-memory run"
    )
    if out_of_memory > 1 and not measured:
        ended += "s"
    return (
        " and ".join(part for part in (runs, ended if out_of_memory else "") if part)
        + " of this setup"
    )


def setup_of(plan: Plan) -> tuple[object, ...]:
    """The settings of a plan that decide what its step does, without batch sizes and length."""
    o = plan.optimize
    return (
        plan.backend,
        catalog.with_sizes(plan).model,
        plan.data.vocab_size,
        plan.data.tokenizer,
        plan.data.isolate_documents,
        msgspec.structs.replace(o, accumulation_steps=min(2, o.accumulation_steps)),
        plan.hybrid,
    )


def kin_of(plan: Plan) -> tuple[object, ...]:
    """What plans have in common whose setups differ in optimizations alone. The heap of a CPU run is not such an
    optimization: plans with different heaps are not compared."""
    backend, model, *data, _, _ = setup_of(plan)
    return backend, model, *data, plan.optimize.heap


def programs_of(plan: Plan, kind: str) -> tuple[object, ...]:
    """The settings of a plan that, in addition to those of its setup, decide which programs are compiled for it. If an
    earlier run has compiled the same programs, they are found on disk."""
    sizes = plan.train.batch_size, plan.evaluation_batch, plan.data.sequence_length
    return (*step_settings(plan, kind), *sizes, plan.optimize.accumulation_steps)


def on_cpu(table: MemoryTable) -> bool:
    return table.budget.kind == "cpu"


def same_machine(run: Measured, machine: Machine) -> bool:
    """Whether a run was made on `machine`: the same device, driver and framework versions."""
    shared = set(run.versions) & set(machine.versions)
    return (
        run.device_name == machine.device_name
        and (run.driver is None or machine.driver is None or run.driver == machine.driver)
        and bool(shared)
        and all(run.versions[name] == machine.versions[name] for name in shared)
    )
