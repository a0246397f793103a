"""The activations that the blocks of any model keep between the forward and the backward pass, in either backend."""

from __future__ import annotations

from memconsole.memory.activations import general, torch_regressor
from memconsole.memory.activations.block_programs import kept_per_token
from memconsole.memory.activations.jax_block import jax_block
from memconsole.memory.state.gradient_flow import Flow
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan
from memconsole.plan.sections.optimize import Checkpointing


def kept_by_blocks(
    plan: Plan,
    model: Model,
    flow: Flow,
    checkpointing: Checkpointing,
    kind: str,
    *,
    tiled: bool = False,
) -> int:
    """Bytes per position that all blocks keep for the backward pass. Blocks that it does not reach keep nothing. `tiled`:
    their MLPs are computed in tiles."""
    o = plan.optimize
    if isinstance(model, Recommender):
        model = model.decoder
    if not isinstance(model, Architecture):
        narrow = o.precision != "fp32" and not (plan.backend == "jax" and kind == "cpu")
        compute = 2 if narrow else 4
        if general.is_known(model, plan.backend):
            return flow.blocks * torch_regressor.block_bytes(model, checkpointing, compute).kept
        return general.kept_bytes(model, flow, checkpointing, compute)
    if plan.backend == "jax":
        adapters = o.lora_rank, o.lora_targets
        block = jax_block(model, o.precision, checkpointing, kind, *adapters, tiled=tiled)
        return flow.blocks * block.kept
    kept = kept_per_token(model, o, checkpointing, kind, flow.inputs == 0, tiled=tiled)
    return flow.blocks * (kept.token + kept.score * plan.data.sequence_length)
