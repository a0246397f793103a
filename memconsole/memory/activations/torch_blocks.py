"""The blocks of a torch step: which program each runs, and its bytes at the plan's batch size and length."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memconsole.memory.activations.block_programs import Live, block_program, evaluated_block
from memconsole.memory.activations.dropping import dropping_bytes
from memconsole.memory.activations.kernels import (
    CAPPED_QUERIES,
    EXPERT_ROWS,
    Kernels,
    Mask,
    attends_in_parts,
    computes_single_experts,
    kernels_of_choice,
)
from memconsole.memory.activations.tiles import tile_of
from memconsole.memory.activations.torch_compiled import compiled_block, compiled_evaluation
from memconsole.memory.activations.torch_masks import mask_of
from memconsole.memory.state.step_sizes import StepSizes


class Blocks:
    """A number of blocks that run the same program, with its bytes at one batch size and length."""

    def __init__(self, step: StepSizes, kernels: Kernels, count: int) -> None:
        a, tokens = step.architecture, step.tokens
        scores = tokens * step.sequence
        self.count = count
        compiled = step.plan.optimize.compile
        self.program = compiled_block(a, kernels) if compiled else block_program(a, kernels)
        self.forward = widest(self.program.forward, tokens, scores)
        # Several devices first add up whole gradients over the devices, and then over micro-batches.
        adds = step.accumulates and step.shards == 1
        backward = self.program.adding if adds else self.program.backward
        self.backward = widest(backward, tokens, scores)
        evaluated = step.evaluation_tokens
        evaluating = kernels_of_evaluation(kernels, tile=tile_of(step, evaluated))
        self.evaluation = widest(
            compiled_evaluation(a, evaluating) if compiled else evaluated_block(a, evaluating),
            evaluated,
            evaluated * step.sequence,
        )
        self.kept = self.program.kept.activations.bytes(tokens, scores)
        """Activations between the forward and the backward pass."""
        self.kept_copies = self.program.kept.copies
        self.copies = self.program.cast + self.kept_copies


def blocks_of(step: StepSizes, kernels: Kernels) -> list[Blocks]:
    """The blocks grouped by whether attention gets a mask. A first block above frozen weights keeps less: `Timeline`
    subtracts that, unless the model has one block, which then gets `Kernels.first`."""
    a = step.architecture
    masked, mask = a.local_layers if a.windowed(step.sequence) else 0, mask_of(step)
    if step.plan.data.isolate_documents:
        masked = a.layers
    counts: dict[Mask, int] = {mask: masked, "": a.layers - masked}
    found = []
    if starts_frozen(step) and a.layers == 1:
        first = msgspec.structs.replace(kernels, first=True, mask=mask if masked else "")
        return [Blocks(step, first, 1)]
    for kind, count in counts.items():
        if count:
            found.append(Blocks(step, msgspec.structs.replace(kernels, mask=kind), count))
    return found


def starts_frozen(step: StepSizes) -> bool:
    """Whether the input of the first block needs no gradient: at most adapters are trained in it, nothing before it."""
    return step.frozen_blocks and not step.flow.below


def kernels_of(step: StepSizes) -> Kernels:
    """The kernel settings of a plan's blocks, without a mask."""
    o, a = step.plan.optimize, step.architecture
    parts = attends_in_parts(step.plan, a)
    return msgspec.structs.replace(
        kernels_of_choice(o, o.gradient_checkpointing, step.kind, frozen=step.frozen_blocks),
        stepping=o.optimizer if o.optimizer_in_backward else "",
        offloaded=o.optimizer_in_backward and step.state.host > 0,
        compressed=o.optimizer_in_backward and o.optimizer_offload == "compressed",
        queries=min(CAPPED_QUERIES, step.sequence) if parts else 0,
        rows=min(EXPERT_ROWS, max(step.tokens, step.evaluation_tokens)) if a.experts else 0,
        tile=tile_of(step, step.tokens),
        single_experts=computes_single_experts(a, step.kind, step.compute),
        dropped=step.plan.train.attention_dropout > 0,
        dropout_bytes=dropping_bytes(step),
    )


@lru_cache(maxsize=256)
def kernels_of_norm(kernels: Kernels) -> Kernels:
    """The kernel settings of the final norm."""
    return msgspec.structs.replace(
        kernels,
        checkpointing="none",
        rank=0,
        targets="all",
        storage="none",
        tile=0,
        single_experts=False,
        rounded=False,
        summed=False,
        dropped=False,
        dropout_bytes=0,
    )


@lru_cache(maxsize=256)
def kernels_of_evaluation(kernels: Kernels, *, tile: int = 0) -> Kernels:
    """The kernel settings of an evaluation, which saves nothing. `tile`: `Kernels.tile` of its micro-batches."""
    return msgspec.structs.replace(
        kernels,
        checkpointing="none",
        tile=tile,
        first=False,
        summed=False,
        stepping="",
        offloaded=False,
        dropped=False,
        dropout_bytes=0,
    )


def widest(moments: tuple[Live, ...], tokens: int, scores: int) -> Live:
    """The largest of a program's moments at one batch size and length."""
    if len(moments) == 1:
        return moments[0]
    return max(moments, key=lambda live: live.total.bytes(tokens, scores))
