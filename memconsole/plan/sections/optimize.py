"""The plan's section on optimizations: precision, optimizer, adapters, and what saves memory."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from memconsole.plan.sections.section import Section, about

Precision = Literal["fp32", "bf16", "fp16", "bf16-sr"]
Checkpointing = Literal["none", "selective", "attention", "full"]
BaseStorage = Literal["none", "int8", "nf4"]
OptimizerName = Literal[
    "adamw", "adamw-8bit", "adamw8-all", "adafactor", "apollo-mini", "lion", "muon", "sgd"
]
EIGHT_BIT: tuple[OptimizerName, ...] = ("adamw-8bit", "adamw8-all")
"""Optimizers whose moments are stored in 8 bits."""
OptimizerOffload = Literal["none", "cpu", "pinned", "compressed"]
Sharding = Literal["none", "ddp", "fsdp"]
Heap = Literal["fast", "jemalloc", "tight"]
LoraTargets = Literal["all", "attention", "query-value", "mlp"]


class OptimizeChoice(Section, frozen=True, kw_only=True):
    precision: Annotated[
        Precision,
        about(
            "fp32; 16-bit compute with fp32 weights; or bf16-sr: bf16 weights, stochastically rounded"
        ),
    ] = "fp32"
    gradient_checkpointing: Annotated[
        Checkpointing,
        about(
            "recompute activations in the backward pass (JAX: remat): all but block inputs (full), attention's outputs too "
            "(attention), matmuls' too (selective)"
        ),
    ] = "none"
    accumulation_steps: Annotated[
        int, about("micro-batches per optimizer step", ge=1, le=1_048_576)
    ] = 1
    optimizer: Annotated[
        OptimizerName,
        about(
            "update rule and its state; adamw8-all: the state of embedding and head in 8 bits, too"
        ),
    ] = "adamw"
    optimizer_offload: Annotated[
        OptimizerOffload,
        about("where the optimizer state waits between steps; compressed: on the CPU in 16 bits"),
    ] = "none"
    optimizer_in_backward: Annotated[
        bool, about("update each weight as soon as its gradient is there")
    ] = False
    activation_offload: Annotated[bool, about("keep saved activations off the device")] = False
    fused_loss: Annotated[bool, about("chunked loss: the full logits never exist")] = False
    tiled_mlp: Annotated[
        bool,
        about("compute each block's MLP for a few tokens at a time, and again for its gradients"),
    ] = False
    freeze_base: Annotated[
        bool, about("do not train the loaded weights; LoRA always freezes them")
    ] = False
    lora_rank: Annotated[
        int, about("rank of the adapters on a frozen base; 0: none", ge=0, le=1024)
    ] = 0
    lora_alpha: Annotated[
        Annotated[float, Meta(gt=0.0, le=100_000.0)] | None,
        about("the adapters' output is multiplied by alpha / rank; none: alpha is twice the rank"),
    ] = None
    lora_targets: Annotated[
        LoraTargets, about("matrices that have adapters: of attention and MLP, or some of them")
    ] = "all"
    lora_dropout: Annotated[
        float, about("share of the adapters' inputs that is dropped while training", ge=0.0, lt=1.0)
    ] = 0.0
    base_storage: Annotated[
        BaseStorage,
        about(
            "codes of a frozen base's matrices; int8, nf4: of 8 or 4 bits; none: the matrices keep the precision of the "
            "computation, fp32 or 16 bits"
        ),
    ] = "none"
    compile: Annotated[
        bool, about("compile each block: with torch.compile, or in JAX without a loop over blocks")
    ] = False
    sharding: Annotated[
        Sharding, about("over several devices: copies (ddp), or weights and state split (fsdp)")
    ] = "none"
    heap: Annotated[
        Heap,
        about(
            "memory that a CPU run has freed: fast keeps it; jemalloc keeps it closely packed; tight gives it back"
        ),
    ] = "fast"
