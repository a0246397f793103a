"""What a run measured of its memory, and what it lacked if memory ran out."""

from __future__ import annotations

from memconsole.runs.read.report.comparison import MeasuredLine
from memconsole.runs.read.state.facts import FactsSoFar
from memconsole.runs.record.failures.shortfall import Shortfall, shortfall

SETTLED_STEPS = 10
"""After so many steps the heap of a run on a CPU has about reached its peak: in torch it grows by a tenth after the fifth."""


def on_cpu(facts: FactsSoFar) -> bool:
    return facts.started is not None and facts.started.device_kind == "cpu"


def measured_of(facts: FactsSoFar) -> MeasuredLine:
    """The run's peaks, and the reason for each missing one. Without any measurement, no reasons."""
    cpu = on_cpu(facts)
    found = {
        "peak_bytes": facts.peak_bytes,
        # On a CPU, only the trainer's own allocations are charged to it.
        "device_bytes": facts.peak_bytes if cpu else facts.peak_device_bytes,
        "host_bytes": facts.peak_host_bytes,
        "reserved_bytes": None if cpu else facts.peak_reserved_bytes,
        "host_anonymous_bytes": facts.peak_host_anonymous_bytes,
        "host_shared_bytes": facts.peak_host_shared_bytes,
    }
    if facts.memory is None and not any(found.values()):
        return MeasuredLine()
    missing = {
        name: "not reported by this device" for name, value in found.items() if value is None
    }
    if cpu:
        missing["reserved_bytes"] = (
            "not measured on a CPU, whose allocator does not report what it keeps in reserve"
        )
    return MeasuredLine(**found, missing=missing)


def is_lower_bound(facts: FactsSoFar, *, ran_out: bool) -> bool:
    """Whether the measured peaks may be too low to judge the estimate by: memory ran out, no step was taken, or a run on a
    CPU took so few that its heap still grew."""
    return ran_out or facts.step < (SETTLED_STEPS if on_cpu(facts) else 1)


def shortfall_of(facts: FactsSoFar) -> Shortfall | None:
    """What a run that ran out of memory lacked; None if nothing was measured."""
    error = facts.error
    return shortfall(
        facts.phase,
        facts.peak_bytes,
        error.held_bytes if error else None,
        error.requested_bytes if error else None,
        # On a CPU, freed heap pages may not be returned yet, so after a whole step the held
        # bytes do not count as evidence.
        counts_held=not on_cpu(facts) or facts.step == 0,
    )
