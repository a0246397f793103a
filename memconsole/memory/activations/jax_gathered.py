"""The weights that one of several devices gathers in a JAX step because it holds only a share of them."""

from __future__ import annotations

from typing import NamedTuple

from memconsole.memory.state.step_sizes import StepSizes

ALIGNED_ROWS = 16
"""`memconsole_jax.techniques.activations.fused_loss.ALIGNED_ROWS`."""


class Gathered(NamedTuple):
    """Bytes of weights that a device gathers because it holds only a share of them. All are 0 if it holds them whole."""

    forward: int = 0
    """While blocks run forward: the weights of a block one after another, in the type that computes, and the embedding
    in fp32, if the head uses it again."""
    head: int = 0
    """While the loss is computed."""
    backward: int = 0
    """While blocks run backward: the weights of a block, and what all micro-batches share."""

    @classmethod
    def of(cls, step: StepSizes, element: int, *, training: bool = True) -> Gathered:
        if step.shards == 1:
            return cls()
        s, a = step.sizes, step.architecture
        # The experts of a layer count where their loops hold them whole (`jax_experts.looping`).
        block, head = element * (s.block.elements - s.block_experts), 4 * step.head
        # If the rows cannot be divided evenly, the columns are sharded: they are transposed before they are gathered,
        # and their gradient is transposed back.
        turned = 2 * head // step.shards if a.vocab_size % step.shards else 0
        # A rounded or padded copy, which the loss counts, takes its place, unless micro-batches share it.
        copied = step.compute == 2 or (is_padded(step) and not step.plan.optimize.fused_loss)
        # The gradient of the hidden states is made first. So a head which is not the embedding is free, except on a GPU,
        # when its own gradient is made, which counts as part of the loss.
        freed = training and s.head > 0 and step.kind in ("cpu", "tpu")
        copied = copied or (freed and not step.plan.optimize.fused_loss)
        loss = (0 if copied else head) + turned
        own = cls(block + (0 if s.head else head), loss, block)
        if not (training and step.accumulates):
            return own
        # XLA gathers the embedding and the head once for all micro-batches, and keeps them.
        shared = 4 * (s.embedding + s.head)
        return cls(block + shared, shared + turned, block + shared)


def is_padded(step: StepSizes) -> bool:
    """Whether the rows of the head are padded for a GPU's matmuls."""
    return step.kind == "gpu" and step.architecture.vocab_size % ALIGNED_ROWS > 0
