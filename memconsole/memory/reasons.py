"""Why a toggle saves nothing: one sentence for the person who is about to press its key."""

from __future__ import annotations

from memconsole.memory.table import MemoryTable
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimization import HOST_MEMORY, Optimization
from memconsole.units import format_bytes

PHASE_WORDS = {
    "forward": "the forward pass",
    "loss": "the loss",
    "backward": "the backward pass",
    "optimizer step": "the optimizer step",
    "evaluation": "the evaluation",
    "checkpoint": "the checkpoint",
    "warmup": "a step of the warmup",
    "full": "a full step",
    "predict": "the predict phase",
    "correct": "a step of the correct phase",
}


def nothing_saved(
    row: Optimization, present: Plan, changed: Plan, before: MemoryTable, after: MemoryTable
) -> str:
    """The reason why `after`, of the plan `changed`, is not smaller than `before`."""
    specific = row.saves_nothing and row.saves_nothing(changed, before.budget.kind)
    if specific:
        return specific
    costs = after.device_bytes > before.device_bytes
    if row.touches == (HOST_MEMORY,):
        return _host(before, after)
    peak = phase_words(before.peak_phase)
    live = [c.at(before.peak_phase) for c in before.components if c.name in row.touches]
    if row.touches and not any(live) and not costs:
        return f"the peak is {peak}, where there {_are(row.touches[0])}"
    if costs and row.outweighed:
        return row.outweighed(present, changed)
    if costs and after.peak_phase == before.peak_phase:
        return f"needs more memory in {peak}, where the peak is"
    if costs:
        return f"needs more memory: the peak is then {phase_words(after.peak_phase)}"
    return f"the peak is {peak}, which this does not change"


def phase_words(phase: str) -> str:
    """The name of a phase for use in a sentence."""
    return PHASE_WORDS.get(phase, f"the phase {phase}")


def _are(component: str) -> str:
    absent = {
        "activations": "are no activations left",
        "logits and loss": "are no logits",
        "gradients": "are no gradients",
        "weights": "are no weights",
    }
    return absent.get(component, f"is no {component}")


def _host(before: MemoryTable, after: MemoryTable) -> str:
    if after.host_bytes < before.host_bytes:
        saved = before.host_bytes - after.host_bytes
        return f"the host holds {format_bytes(saved)} less, the device as much"
    return "data waits in host memory, not on the device"
