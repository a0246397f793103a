"""XLA's memory plan of a training step alone, without that of an evaluation."""

from __future__ import annotations

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole_jax import target as targets
from memconsole_jax.compiled.programs import Programs
from memconsole_jax.tracing import trace
from memconsole_jax.tracing.trace_targets import Target


def planned_step(plan: Plan, model: Model, place: Target) -> trace.Needed:
    """The memory that the step needs on `place`, which may be absent."""
    with targets.absent(place.kind):
        return trace._step(Programs.of(plan, model, place.kind, place.devices), place)
