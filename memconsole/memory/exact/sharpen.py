"""Replaces numbers of a formula's memory table by traced or compiled ones, and records the tier of each number."""

from __future__ import annotations

import msgspec

from memconsole.memory.activations import general
from memconsole.memory.coefficients import Certainty, Runtime, certainty, runtime
from memconsole.memory.exact.timeline import Exact, ExactPhase
from memconsole.memory.table import COMPONENTS, Component, MemoryTable, Tier

_RUNTIME = "runtime"
_PROGRAM = "one number for the whole step: parts and phases marked ~ are the formula's"


OTHERS = (0.8, 1.25)
"""Least and most memory of runs on a CPU of models other than decoders, as factors of their exact numbers. The factors vary
because the heap keeps more or less freed memory of steps and evaluations (`python tests/accuracy/systems.py`)."""
_COMPILED = "without torch.compile, whose effect is the formula's"


class KnownExact(msgspec.Struct, frozen=True, kw_only=True):
    """The exact numbers of one plan."""

    exact: Exact
    replayed: bool = True
    """Whether `exact.reserved_bytes` comes from a replay of this plan itself. Otherwise it is scaled from another
    micro-batch size or length."""


def sharpened(table: MemoryTable, known: KnownExact) -> MemoryTable:
    """The formula's `table` with the exact numbers of `known` filled in."""
    exact = known.exact
    costs = runtime(table.backend, table.budget.kind, table.budget.catalog_name)
    totals, rows, tiers = dict(table.phases), _rows(table), dict[str, Tier]()
    owned = next((c.phases for c in table.components if c.name == _RUNTIME), {})
    most = max(owned.values(), default=0)
    for name, found in exact.phases.items():
        phase = name
        if name == exact.program_phase:
            # The compiler gives one number per step; the formula decides which phase is the peak.
            phase = max(table.step_phases, key=table.phases.__getitem__)
            _spread_program(totals, rows, table.step_phases, phase, found, most)
        else:
            _put(totals, rows, phase, found, owned.get(phase, most))
        tiers[phase] = Tier.EXACT
    components = _components(rows)
    peak_phase = max(totals, key=totals.__getitem__)
    peak = totals[peak_phase]
    on_cpu = table.budget.kind == "cpu"
    reserved, reserved_tier = peak, tiers.get(peak_phase, Tier.FORMULA)
    if not on_cpu and exact.reserved_bytes is not None:
        reserved = max(peak, exact.reserved_bytes)
        replayed = known.replayed and exact.reserved_bytes >= peak
        reserved_tier = reserved_tier if replayed else Tier.FORMULA
    elif not on_cpu:
        beside = table.reserved_bytes - table.peak_bytes
        reserved = peak + beside * peak // max(1, table.peak_bytes)
        reserved_tier = Tier.FORMULA if beside else reserved_tier
    device = reserved if on_cpu else reserved + costs.context_bytes
    sure = certainty(table.backend, table.budget.kind)
    band, why = _band(table, peak, reserved, costs, sure, known.replayed)
    return msgspec.structs.replace(
        table,
        tier=tiers.get(peak_phase, Tier.FORMULA),
        components=components,
        phases=totals,
        phase_tiers=tiers,
        peak_phase=peak_phase,
        peak_bytes=peak,
        reserved_bytes=reserved,
        reserved_tier=reserved_tier,
        device_bytes=device,
        device_tier=reserved_tier if on_cpu or not costs.context_bytes else Tier.FORMULA,
        host=table.host.more(table.devices_in_process * (peak - table.peak_bytes) if on_cpu else 0),
        band_bytes=band,
        band_from=why,
        source=exact.source,
        caveat="; ".join(filter(None, (exact.caveat, _PROGRAM if exact.program_phase else ""))),
        least_bytes=exact.least_bytes,
        out_of_memory=exact.out_of_memory,
        formula=table,
    )


def compiled(table: MemoryTable, traced: MemoryTable) -> MemoryTable:
    """The table of a plan with torch.compile, from the trace of the same plan without it. `table` is the formula's
    table with torch.compile. The result is `traced` plus the difference that the formula expects from the compiler."""
    plain = traced.formula
    assert plain is not None
    costs = runtime(table.backend, table.budget.kind, table.budget.catalog_name)
    rows, totals = _rows(table), dict(table.phases)
    for phase, total in table.phases.items():
        totals[phase] = total + traced.phases[phase] - plain.phases[phase]
        parts = {
            c.name: max(0, c.at(phase) + _at(traced, c.name, phase) - _at(plain, c.name, phase))
            for c in table.components
        }
        # A part is clipped at 0 if the formula expects to save more than was traced; keep the total.
        parts[max(parts, key=parts.__getitem__)] += totals[phase] - sum(parts.values())
        for name, size in parts.items():
            rows[name][phase] = (size, Tier.FORMULA)
    peak_phase = max(totals, key=totals.__getitem__)
    peak = totals[peak_phase]
    reserved = traced.reserved_bytes * peak // traced.peak_bytes
    on_cpu = table.budget.kind == "cpu"
    low, high = costs.band
    return msgspec.structs.replace(
        table,
        components=_components(rows),
        phases=totals,
        peak_phase=peak_phase,
        peak_bytes=peak,
        reserved_bytes=reserved,
        device_bytes=reserved if on_cpu else reserved + costs.context_bytes,
        host=table.host.more(table.devices_in_process * (peak - table.peak_bytes) if on_cpu else 0),
        band_bytes=costs.band_bytes(reserved * low, reserved * high),
        source=traced.source,
        caveat="; ".join(filter(None, (_COMPILED, traced.caveat))),
        formula=table,
    )


def _at(table: MemoryTable, name: str, phase: str) -> int:
    return next((c.at(phase) for c in table.components if c.name == name), 0)


def alike(now: MemoryTable, before: MemoryTable) -> tuple[MemoryTable, MemoryTable]:
    """Both tables at the tier of the less exact one, so that their difference comes from the plans alone."""
    if (now.formula is None) == (before.formula is None):
        return now, before
    return now.formula or now, before.formula or before


def saved(now: MemoryTable, after: MemoryTable) -> tuple[int, Tier]:
    """Device bytes that `after` saves compared with `now`, both at the same tier; and that tier."""
    a, b = alike(now, after)
    if a.formula is None or b.formula is None:
        return a.device_bytes - b.device_bytes, Tier.FORMULA
    if a.reserved_tier == b.reserved_tier:
        exact = a.tier == b.tier == a.reserved_tier == Tier.EXACT
        return a.device_bytes - b.device_bytes, Tier.EXACT if exact else Tier.FORMULA
    # Only one of the two was replayed: use its reserved share for both.
    known = a if a.reserved_tier == Tier.EXACT else b
    share = known.reserved_bytes / max(1, known.peak_bytes)
    return int((a.peak_bytes - b.peak_bytes) * share), Tier.FORMULA


Rows = dict[str, dict[str, tuple[int, Tier]]]
"""Bytes and tier by component, then by phase."""


def _rows(table: MemoryTable) -> Rows:
    rows: Rows = {name: {} for name in COMPONENTS}
    for component in table.components:
        rows[component.name] = {p: (n, Tier.FORMULA) for p, n in component.phases.items()}
    return rows


def _put(
    totals: dict[str, int], rows: Rows, phase: str, found: ExactPhase, runtime_bytes: int
) -> None:
    """Set one phase's total and parts. Bytes without a known component are split in the formula's proportions."""
    total, exact = found.total_bytes, dict(found.components)
    if _RUNTIME not in exact:
        total += runtime_bytes
    rest = found.total_bytes - sum(exact.values())
    others = {
        name: row.get(phase, (0, Tier.FORMULA))[0]
        for name, row in rows.items()
        if name not in exact and name != _RUNTIME
    }
    shares = _shared(rest, others)
    for name, row in rows.items():
        if name in exact:
            row[phase] = (exact[name], Tier.EXACT)
        elif name == _RUNTIME:
            row[phase] = (runtime_bytes, Tier.FORMULA)
        elif rest <= 0:
            row[phase] = (0, Tier.EXACT)
        else:
            row[phase] = (shares.get(name, 0), Tier.FORMULA)
    for name in exact.keys() - rows.keys():
        rows[name] = {phase: (exact[name], Tier.EXACT)}
    totals[phase] = total


def _spread_program(
    totals: dict[str, int],
    rows: Rows,
    step: tuple[str, ...],
    phase: str,
    found: ExactPhase,
    runtime_bytes: int,
) -> None:
    """Put the number of a program compiled as a whole into its peak phase, and cap the step's other phases at it."""
    _put(totals, rows, phase, found, runtime_bytes)
    for other in step:
        if other == phase or totals[other] <= totals[phase]:
            continue
        held = {name: row.get(other, (0, Tier.FORMULA))[0] for name, row in rows.items()}
        for name, size in _shared(totals[phase], held).items():
            rows[name][other] = (size, Tier.FORMULA)
        totals[other] = totals[phase]


def _shared(total: int, weights: dict[str, int]) -> dict[str, int]:
    """Split `total` in proportion to `weights`, exact to the byte. If all weights are zero, workspace gets it all."""
    weight = sum(weights.values())
    if total <= 0 or not weights:
        return {}
    if not weight:
        name = "workspace" if "workspace" in weights else next(iter(weights))
        return {name: total}
    shares = {name: total * w // weight for name, w in weights.items()}
    largest = max(weights, key=weights.__getitem__)
    shares[largest] += total - sum(shares.values())
    return shares


def _components(rows: Rows) -> tuple[Component, ...]:
    return tuple(
        Component(
            name,
            {phase: size for phase, (size, _) in row.items() if size},
            {phase: tier for phase, (_, tier) in row.items() if tier != Tier.FORMULA},
        )
        for name, row in rows.items()
    )


def _band(
    table: MemoryTable,
    peak: int,
    reserved: int,
    costs: Runtime,
    sure: Certainty | None,
    replayed: bool,
) -> tuple[tuple[int, int], str]:
    """The uncertainty band of the device bytes, from measured errors of traced, replayed and driver bytes."""
    if sure is None:
        low, high = costs.band
        why = "as wide as the formula's: not yet measured for exact numbers on this kind of device"
        return costs.band_bytes(reserved * low, reserved * high), why
    if table.budget.kind == "cpu":
        low, high, why = *sure.allocated, sure.source
        if table.band_from == general.WHERE_FROM:
            low, high, why = *OTHERS, "measured peaks of runs of models other than decoders"
        return costs.band_bytes(peak * low, peak * high), why
    low, high = sure.reserved if replayed else sure.unreplayed
    least = max(peak * sure.allocated[0], reserved * low)
    return costs.band_bytes(least, reserved * high * sure.allocated[1]), sure.source
