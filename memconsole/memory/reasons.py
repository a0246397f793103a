"""Why a toggle saves nothing: one sentence for the person who is about to press its key."""

from __future__ import annotations

from memconsole.memory.table import MemoryTable
from memconsole.plan.optimizations import Optimization
from memconsole.plan.plan import Plan
from memconsole.units import format_bytes

PHASE_WORDS = {
    "forward": "the forward pass",
    "loss": "the loss",
    "backward": "the backward pass",
    "optimizer step": "the optimizer step",
    "evaluation": "the evaluation",
    "checkpoint": "the checkpoint",
}
TOUCHES: dict[str, tuple[str, ...]] = {
    "optimize.gradient_checkpointing": ("activations",),
    "optimize.fused_loss": ("logits and loss",),
    "optimize.activation_offload": ("activations",),
    "optimize.base_storage": ("weights",),
    "optimize.optimizer": ("optimizer state",),
    "optimize.optimizer_offload": ("optimizer state",),
    "optimize.accumulation_steps": ("activations", "logits and loss"),
    "train.batch_size": ("activations", "logits and loss"),
    "data.sequence_length": ("activations", "logits and loss"),
}
"""The components a toggle makes smaller."""

HOST = ("data.streaming", "data.shuffle_buffer", "data.stride", "data.max_examples")
"""The toggles that bear on host memory alone."""


def nothing_saved(row: Optimization, changed: Plan, before: MemoryTable, after: MemoryTable) -> str:
    """The reason `after` is no smaller than `before`."""
    key, backend, kind = row.key, changed.backend, before.budget.kind
    specific = _specific(key, backend, row.value(changed), changed, kind)
    if specific:
        return specific
    costs = after.device_bytes > before.device_bytes
    if key in HOST:
        return _host(before, after)
    peak = phase_words(before.peak_phase)
    touched = TOUCHES.get(key, ())
    live = [c.at(before.peak_phase) for c in before.components if c.name in touched]
    if touched and not any(live) and not costs:
        return f"the peak is {peak}, where there {_are(touched[0])}"
    if key == "optimize.accumulation_steps" and costs:
        return "the gradient copy of accumulation outweighs the smaller micro-batch"
    if key == "optimize.precision" and costs:
        return f"the 16-bit copies of the weights outweigh the smaller activations in {backend}"
    if costs:
        return f"needs more memory: the peak is then {phase_words(after.peak_phase)}"
    return f"the peak is {peak}, which this does not change"


def phase_words(phase: str) -> str:
    """The phase as a sentence names it."""
    return PHASE_WORDS.get(phase, f"the phase {phase}")


def _are(component: str) -> str:
    absent = {"activations": "are no activations left", "logits and loss": "are no logits"}
    return absent.get(component, f"is no {component}")


def _specific(key: str, backend: str, value: object, changed: Plan, kind: str) -> str:
    if backend == "jax" and kind == "cpu" and key == "optimize.precision":
        return "XLA on a CPU computes and stores 16-bit types in 32 bits"
    if key == "optimize.sharding" and changed.device.count == 1:
        return "one device: there is nothing to split over"
    if kind == "cpu" and key == "optimize.optimizer_offload" and value in ("cpu", "pinned"):
        return "on a CPU the state already waits in host memory"
    if key == "optimize.compile" and kind == "cpu":
        return "the compiler takes more in the trainer than compiled blocks save"
    if key == "optimize.compile":
        return "at the peak, compiled blocks hold as much as without, with adapters more"
    if key == "optimize.lora_rank" and value == 0:
        return "without adapters the whole model has gradients and optimizer state"
    return ""


def _host(before: MemoryTable, after: MemoryTable) -> str:
    if after.host_bytes < before.host_bytes:
        saved = before.host_bytes - after.host_bytes
        return f"saves host memory, not device memory ({format_bytes(saved)})"
    return "data waits in host memory, not on the device"
