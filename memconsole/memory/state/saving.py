"""The sharded tensors that a torch process gathers from the other processes in order to save them."""

from __future__ import annotations

from memconsole.memory.state.step_sizes import StepSizes

SHARD_BYTES = 64 << 20
"""`memconsole_trainer.weights.checkpoint.SHARD_BYTES`."""


def gathered_to_save(step: StepSizes) -> int:
    """Bytes of whole tensors that are gathered: on a CPU until a file is full, elsewhere one at a time."""
    if step.shards == 1 or step.plan.backend != "torch":
        return 0
    if step.kind == "cpu":
        held = (step.weights * step.shards, step.state.resident * step.shards)
        return sum(min(SHARD_BYTES, size) for size in held)
    return 4 * step.sizes.used.largest
