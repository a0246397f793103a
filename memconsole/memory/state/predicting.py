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
    """The moments of a jump that can be the largest: inner products of movements, the path, a forward pass, the move of
    the weights. `narrow`: predict phases compute in bf16. `restoring`: the optimizer state is being copied back."""
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
        Moved(step.weights, kept + earlier, workspace=_movements_bytes(step)),
        Moved(used, path + kept + earlier, workspace=_movements_bytes(step, path=True)),
        Moved(used + tried, path + kept + earlier, evaluates=True),
        Moved(step.weights, path + kept + before),
    )


def _movements_bytes(step: StepSizes, *, path: bool = False) -> int:
    """Temporary bytes of the movements of a slice of a weight, and with `path` of the path computed from them. JAX computes
    them on the host."""
    backend, count = step.plan.backend, step.plan.hybrid.snapshots
    if backend == "jax" and step.kind != "cpu":
        return 0
    moved = count - 1
    arrays = moved + (1 if backend == "torch" else 0)  # torch widens a snapshot
    if path:
        # variance, mean and path; numpy computes the variance from a copy
        arrays = moved + 3 + (moved if backend == "jax" else 0)
    rows = WIDE * arrays + (0 if step.kind == "cpu" else NARROW * count)
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
    if (
        restoring and step.plan.backend == "jax"
    ):  # it frees the codes of an array once they are decoded
        codes = 0
    if restoring or kind == "none" or (_same_memory(step) and kind in ("cpu", "pinned")):
        return step.state.resident + codes
    return step.state.average + codes


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
