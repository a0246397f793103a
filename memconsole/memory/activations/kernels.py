"""What decides which operations a block of the torch decoder runs, and the names under which its programs are stored."""

from __future__ import annotations

from typing import Literal

import msgspec

from memconsole.memory.state.optimizer_state import update_bytes
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Checkpointing, OptimizeChoice, Plan
from memconsole.plan.sections.optimize import LoraTargets

Part = Literal["block", "norm", "evaluated block", "evaluated norm"]
"""What a program describes: a training step of a block or of the final norm, or their evaluation."""
Mask = Literal["", "window", "documents", "padded"]
"""The additive mask that attention gets: none, one for all rows (T, T), one for each row (B, 1, T, T), or the latter
copied by CUDA's kernel into padded rows."""


EXPERT_ROWS = 1024
"""`memconsole_torch.models.expert_products.ROWS`: the most rows of an expert that are computed at a time."""
EXPERT_ALIGNED = 8
"""`memconsole_torch.models.expert_matrices.ALIGNED`: widths that are no multiples of this keep a GPU from computing the
products of all experts by one call."""
CAPPED_QUERIES = 128
"""`memconsole_torch.models.capped_attention.QUERIES`: attention with capped scores or dropped weights is computed for so
many queries at a time."""


def attends_in_parts(plan: Plan, a: Architecture) -> bool:
    """Whether a training step of torch computes attention for some queries at a time."""
    return a.attention_cap is not None or plan.train.attention_dropout > 0


def computes_single_experts(a: Architecture, kind: str, compute: int) -> bool:
    """Whether a GPU computes experts one by one: `Kernels.single_experts` of an architecture."""
    aligned = a.hidden_size % EXPERT_ALIGNED == a.intermediate_size % EXPERT_ALIGNED == 0
    return a.experts > 0 and not aligned and compute == 2 and kind in ("gpu", "rocm")


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """The settings, apart from sizes, that decide which operations a block runs."""

    compute: int
    """Bytes of an element in matmuls."""
    kind: str
    checkpointing: Checkpointing
    rank: int = 0
    """Rank of the adapters; 0 without adapters."""
    targets: LoraTargets = "all"
    """The matrices that have adapters, if there are any."""
    frozen: bool = False
    """Whether no matrix is trained, only adapters if there are any."""
    rounded: bool = False
    """Whether weights are stored in bf16 only, without an fp32 copy."""
    summed: bool = False
    """Whether gradients of bf16 weights are still accumulated in fp32."""
    storage: str = "none"
    """Storage type of a frozen base's matrices. If it is not bf16, each matrix is decoded for each matmul."""
    mask: Mask = ""
    stepping: str = ""
    """The optimizer, if each weight is updated as soon as its gradient is computed; else empty."""
    offloaded: bool = False
    """Whether the optimizer's state is copied from host memory for each update."""
    compressed: bool = False
    """Whether the optimizer's moments are stored in bf16."""
    queries: int = 0
    """Queries whose scores exist at a time, if scores are capped or dropped."""
    rows: int = 0
    """Rows of an expert that are computed at a time, where experts are computed one by one."""
    tile: int = 0
    """Tokens of the MLP that are computed at a time; 0 if all are."""
    single_experts: bool = False
    """Whether a GPU computes experts one by one in 16 bits. Otherwise one call computes all of them."""
    dropped: bool = False
    """Whether attention weights are dropped."""
    dropout_bytes: int = 0
    """Bytes per token that dropout of activations needs while it runs: a copy of its input, and the mask."""
    first: bool = False
    """Whether this is the first block of a frozen base: its input needs no gradient."""


def updating_bytes(
    k: Kernels, shape: tuple[int, ...], *, outside: bool = False, matrices: int = 1
) -> int:
    """Temporary bytes of updating a weight inside the backward pass. `outside`: the weight is not part of a block.
    `matrices`: how many it holds."""
    return update_bytes(
        k.kind,
        k.stepping,
        shape,
        offloaded=k.offloaded,
        compressed=k.compressed,
        rounded=k.rounded,
        outside=outside,
        matrices=matrices,
    )


def kernels_of_choice(
    choice: OptimizeChoice, checkpointing: Checkpointing, kind: str, *, frozen: bool
) -> Kernels:
    """The kernels of a block without a mask. `frozen`: no matrix of it is trained."""
    rounded = choice.precision == "bf16-sr"
    return Kernels(
        compute=4 if choice.precision == "fp32" else 2,
        kind=kind,
        checkpointing=checkpointing,
        rank=choice.lora_rank,
        targets=choice.lora_targets if choice.lora_rank else "all",
        frozen=frozen,
        rounded=rounded,
        summed=rounded and choice.accumulation_steps > 1,
        storage=choice.base_storage,
    )


def structure(a: Architecture) -> str:
    """The name of everything in an architecture, apart from sizes, that decides which operations its block runs."""
    words = {
        "gated": a.gated_mlp,
        "biases": a.biases,
        "projectionbiases": a.projection_biases,
        "qknorm": a.query_key_norm,
        "joint": a.joint_query_key_norm,
        "noprenorms": not a.pre_norms,
        "postnorms": a.post_norms,
        "offset": a.norm_unit_offset,
        "parallel": a.parallel_residual,
        "scaledbranches": a.residual_multiplier != 1.0,
        "capped": a.attention_cap is not None,
        "experts": a.experts > 0,
        "normalized": a.normalized_shares,
        "grouped": a.heads > a.kv_heads,
    }
    return "-".join((a.norm, a.positions, *(word for word, here in words.items() if here)))


def program_name(part: Part, k: Kernels) -> str:
    """The name of a block's program. Settings that do not change its bytes are left out of it."""
    precision = "fp32" if k.compute == 4 else "bf16"
    if k.rounded and not k.frozen:
        precision = "bf16-sr-summed" if k.summed else "bf16-sr"
    words = (
        part,
        precision,
        k.kind if k.kind in ("cpu", "apple") else "gpu",
        k.checkpointing,
        _base(k),
        mask_of_kernel(k),
        "dropped" if k.dropped else "",
        "first" if k.first else "",
        "alone" if k.single_experts else "",
        "tiled" if k.tile else "",
    )
    return " ".join(word for word in words if word)


def _base(k: Kernels) -> str:
    """What is trained of a block's matrices, and how frozen ones are stored."""
    if not k.frozen:
        return ""
    return f"adapted-{k.storage}" if k.rank else "frozen"


def mask_of_kernel(k: Kernels) -> Mask:
    """The mask, if it changes the bytes of attention. A CPU's kernel reads any mask in place. CUDA's 16-bit kernel
    accepts no mask, so another kernel runs if there is one; in fp32 that other kernel runs with and without a mask.
    Attention with dropout reads any mask in place."""
    if k.dropped:
        return ""
    if k.kind == "apple":
        return k.mask
    if k.kind == "cpu":
        return ""
    if k.mask == "padded":
        return "padded"
    return "window" if k.mask and k.compute == 2 else ""
