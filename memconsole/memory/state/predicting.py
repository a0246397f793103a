"""Memory of a hybrid run besides weights and optimizer state: snapshots, and the weights that a jump tries.

Follows `memconsole_torch.jumps` and `memconsole_jax.jumps`. Symbols in comments: n trained elements, m those of
matrices.
"""

from __future__ import annotations

import msgspec

from memconsole.memory.state.optimizer_state import BLOCK
from memconsole.memory.state.step_sizes import StepSizes

NARROW = 2
"""Bytes of an element in bf16: of a snapshot, of a path, and of weights that are tried in bf16."""
WIDE = 4
DEVICE_SLICE, HOST_SLICE = 2**22, 2**17
"""Elements of a weight whose movements are multiplied at a time: in torch on a GPU; on a CPU, and in JAX always."""


class Moved(msgspec.Struct, frozen=True):
    """Live bytes at one moment of a jump, without the optimizer state."""

    weights: int
    """The weights, and copies of them that are tried."""
    snapshots: int
    """The path, and on a CPU the snapshots and the weights before the jump."""
    workspace: int = 0
    evaluates: bool = False
    """Whether a forward pass runs."""


def moments(step: StepSizes, *, narrow: bool, restoring: bool) -> tuple[Moved, ...]:
    """The moments of a jump that can be the largest: inner products of the snapshots, a forward pass, the move of the
    weights. `narrow`: predict phases compute in bf16. `restoring`: the optimizer state is being copied back."""
    n = step.trained.elements
    m = n - step.trained.small
    path, vectors = NARROW * n, WIDE * (n - m)
    on_cpu = step.kind == "cpu"
    kept = snapshot_bytes(step, "predict") if on_cpu else 0
    before = _before_bytes(step) if on_cpu else 0
    h = step.plan.hybrid
    jumps = h.correction_interval - (0 if h.memory == "none" else h.restore_ahead)
    earlier = before if restoring or jumps > 1 else 0  # kept since an earlier jump of the phase
    used, tried = step.weights, WIDE * n
    if narrow:
        used += NARROW * m - (
            0 if _same_memory(step) else WIDE * m
        )  # fp32 matrices wait on the host
        tried = NARROW * m + vectors
        if on_cpu and step.plan.backend == "jax":
            tried += WIDE * m  # XLA widens 16-bit weights on a CPU
    return (
        Moved(step.weights, kept + earlier, workspace=_products_bytes(step)),
        Moved(used + tried, path + kept + earlier, evaluates=True),
        Moved(step.weights, path + kept + before),
    )


def _products_bytes(step: StepSizes) -> int:
    """Temporary bytes of the inner products of movements, computed slice by slice: the snapshots in fp32, and each
    movement with its two snapshots. JAX computes them on the host."""
    if step.plan.backend == "jax" and step.kind != "cpu":
        return 0
    count = step.plan.hybrid.snapshots
    rows = WIDE * (count + 3 * (count - 1))
    return rows * min(step.trained.largest, HOST_SLICE if step.kind == "cpu" else DEVICE_SLICE)


def kept_bytes(step: StepSizes, phase: str) -> int:
    """Bytes of device memory that snapshots take in a phase that trains: 0 unless device and host share memory."""
    if step.kind != "cpu" or phase == "warmup":
        return 0
    return snapshot_bytes(step, phase) + (_before_bytes(step) if phase == "correct" else 0)


def host_bytes(step: StepSizes) -> int:
    """Host bytes that a hybrid run needs in addition to its training steps, if the device has memory of its own."""
    o = step.plan.hybrid.memory
    away = _own_state(step) if o in ("cpu", "pinned") and not _same_memory(step) else 0
    matrices = WIDE * (
        step.trained.elements - step.trained.small
    )  # they wait while bf16 copies are tried
    return snapshot_bytes(step, "predict") + _before_bytes(step) + matrices + away


def snapshot_bytes(step: StepSizes, phase: str) -> int:
    """Bytes of the snapshots and of their anchor (the first snapshot), always on the host."""
    h, count = step.plan.hybrid, step.plan.hybrid.snapshots
    if phase == "full":
        count = min(count, 1 + h.lengths.full_steps // h.snapshot_stride)
    return NARROW * (1 + count) * step.trained.elements


def state_held(step: StepSizes, *, restoring: bool) -> int:
    """Bytes of optimizer state on the device during a jump. `restoring`: it is being copied back."""
    own, kind = _own_state(step), step.plan.hybrid.memory
    codes = _compressed(own) if kind == "compress" else 0
    if restoring or kind == "none" or (_same_memory(step) and kind in ("cpu", "pinned")):
        return step.state.resident + codes
    return step.state.average + codes


def came_back(step: StepSizes) -> int:
    """On a CPU: bytes that are allocated in a jump while the optimizer state is copied back, but were not in the first jump
    of the phase: that state, and the weights before that jump. 0 on other devices, whose heap is estimated differently."""
    if step.kind != "cpu":
        return 0
    held = state_held(step, restoring=True) - state_held(step, restoring=False)
    return held + _before_bytes(step)


def _before_bytes(step: StepSizes) -> int:
    """Bytes of the weights before the latest jumps, kept on the host until the correct phase ends."""
    return WIDE * step.trained.elements


def _own_state(step: StepSizes) -> int:
    return step.state.resident - step.state.average


def _compressed(state: int) -> int:
    """Bytes of a state of fp32 numbers in 8-bit codes, with an fp32 scale for each block."""
    numbers = state // WIDE
    return numbers + WIDE * -(-numbers // BLOCK)


def _same_memory(step: StepSizes) -> bool:
    return step.kind in ("cpu", "apple")
