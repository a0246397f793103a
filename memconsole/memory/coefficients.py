"""Measured numbers that the formulas need, read once from coefficients.json. Each entry names its source."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import msgspec

from memconsole import typed_json


class Heap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much freed memory the heap of a CPU keeps at the peak: a sum of products, each of a share and some bytes."""

    step: float = 0.0
    """The share of all bytes that a step allocates and frees, for which XLA takes one block."""
    activations: float = 0.0
    """The share of the bytes that all blocks keep for the backward pass without checkpointing. Checkpointed blocks
    allocate the same bytes one after the other, and arrays that stay between them leave gaps."""
    activations_frozen: float = 0.0
    """The same share if the matrices of the blocks are frozen: then no gradients fill the gaps."""
    logits: float = 0.0
    """The share of the largest logits of a decoder that are live at once. Other models compute their loss in small
    pieces."""
    evaluation: float = 0.0
    """The share of the bytes that an evaluation allocates and frees, for models other than decoders. After an evaluation
    of a decoder the heap keeps no more than after a step. `tests/accuracy/systems.py` measures it."""
    trimmed: float = 1.0
    """The share of this sum that is kept in warmup and full phases of a hybrid run. Before every tenth step the trainer
    returns the heap's free memory to the system, so it grows less. The correct phase, which is the peak, is priced with
    the whole sum. `python tests/accuracy/hybrid.py --heap` fits it."""
    range: tuple[float, float]
    """The least and the most that was measured, as factors of this sum."""


class Runtime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a backend needs on one kind of device in addition to the plan's tensors."""

    context_bytes: int
    """Charged to the process by the driver, outside the framework's allocator."""
    workspace_bytes: int
    """Allocated by the framework, independent of the plan: matmul workspaces. On a CPU: thread pools, lazily loaded
    code and compiled programs."""
    workspaces: dict[str, int] = {}
    """`workspace_bytes` of catalog devices that differ from the others of their kind."""
    contexts: dict[str, int] = {}
    """The same for `context_bytes`."""
    kernels_16_bytes: int = 0
    """Allocated in addition with 16-bit matmuls: on a CPU oneDNN's compiled kernels, one for each shape."""
    library_bytes: int = 0
    """Allocated in addition by XLA's libraries on a CPU, for models that are no decoders: for decoders a formula says how
    much. `python tests/accuracy/systems.py --write` fits it."""
    settled_bytes: int | None = None
    """On a CPU: what stays allocated between steps in addition to tensors, after free pages went back to the system.
    It replaces `workspace_bytes` while a run evaluates and saves. None: the same as while it trains.
    `python tests/accuracy/cpu.py --outside` fits it."""
    reserve_share: float
    """What the allocator reserves above the live peak, as a share of the peak."""
    reserve_share_16: float | None = None
    """The same with 16-bit matmuls; None if it does not differ."""
    reserve_bytes: int = 0
    """Reserved in addition, whatever the peak: partly used pages."""
    host_bytes: int
    """Resident memory of the trainer's process tree before the model is built."""
    text_bytes: int = 0
    """Part of `host_bytes`: libraries that only runs on text load. `python tests/accuracy/systems.py --write` fits it."""
    compiler_bytes: int = 0
    """Host memory of torch.compile in the trainer: what compiling loads, and the compiled code."""
    compiler_import_bytes: int = 0
    """Host memory of importing torch's compiler, before the model is built."""
    compiling_bytes: int = 0
    """Host memory that XLA takes to compile a plan's programs on a CPU, and frees before the model is built. `python
    tests/accuracy/cpu.py --outside` fits it."""
    compiler_code_bytes: int = 0
    """Part of `host_bytes`: XLA's compiler, which a run does not load if it finds its programs on disk. Fitted as
    `text_bytes` is."""
    heaps: dict[str, Heap] = {}
    """By `optimize.heap`: what the heap of a CPU keeps of freed memory at the peak."""
    context_range: tuple[int, int] | None = None
    """Smallest and largest driver charge that was measured; None if `band` applies to it too. On a CPU: the least and the
    most bytes that XLA's libraries took in addition to their estimate, in the plans of docs/estimates.md."""
    band: tuple[float, float]
    """Low and high factor that bound the allocator's bytes."""
    source: str

    def reserved_bytes(self, peak: int, *, sixteen_bit: bool) -> int:
        """What the allocator holds for a live peak of `peak` bytes."""
        share = self.reserve_share
        if sixteen_bit and self.reserve_share_16 is not None:
            share = self.reserve_share_16
        return peak + int(peak * share) + self.reserve_bytes

    def band_bytes(self, low: float, high: float) -> tuple[int, int]:
        """Low and high device bytes: the `low` and `high` bytes of the allocator, each plus the driver's charge."""
        least, most = self.context_range or (
            self.context_bytes * self.band[0],
            self.context_bytes * self.band[1],
        )
        return int(low + least), int(high + most)


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of a device's peak rates that a training step reaches."""

    flops_share: float
    bandwidth_share: float
    step_overhead_seconds: float
    """Per micro-batch and layer: kernel launches and the interpreter."""
    eight_bit_seconds: float = 0.0
    """Per trained element whose optimizer state has 8 bits, in addition to its traffic."""
    source: str


class Overlap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many copies of each temporary XLA keeps alive at once on a kind of device."""

    logits: float
    """Whole logits, counted in fp32."""
    logits_16: float
    """The same with 16-bit matmuls."""
    logits_16_padded: float
    """The same with 16-bit matmuls and a padded vocabulary."""
    chunk: float
    """A chunk's logits, counted in fp32."""
    chunk_16: float
    padded_head: float
    """The head's matrix, if its rows are padded for a GPU's matmuls."""
    cast_head: float
    """The head's matrix cast to 16 bits, with 16-bit matmuls."""
    early_blocks: float
    """Gradients of all blocks: the share that is already allocated while the loss runs."""
    early_blocks_chunked: float
    """The same with a chunked loss."""
    loss_stream: float
    """The fp32 residual stream while the loss runs."""
    mlp: float
    """A tensor of the MLP's inner width, in the backward pass of a block's MLP."""
    mlp_16: float
    """The same with 16-bit matmuls."""
    mlp_stream: float
    """The fp32 residual stream, in the backward pass of a block's MLP."""
    scores: float
    """A chunk's fp32 attention scores, in the backward pass of a block's attention."""
    heads: float
    """A tensor of the queries' width, in the backward pass of a block's attention."""
    heads_stream: float
    again: float
    """What a checkpointed block recomputes in fp32, in its backward pass. TPUs round a tensor to 16 bits if only
    matmuls read it."""
    layer: float
    """One block's matrices, sliced from the stacked weights, in its backward pass."""
    rounded_blocks: float
    """A 16-bit copy of all blocks' fp32 matrices: XLA may round them once before the loop over blocks."""
    slice: float
    """Everything one block keeps, in the backward pass of a block without checkpointing."""
    source: str


class Certainty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured error of exact numbers on a kind of device, as low and high factors."""

    allocated: tuple[float, float]
    """For live bytes, traced or compiled."""
    reserved: tuple[float, float] = (1.0, 1.0)
    """For the allocator's bytes, if they were replayed for the plan itself."""
    unreplayed: tuple[float, float] = (1.0, 1.0)
    """For the allocator's bytes, if they were not replayed for the plan itself."""
    source: str
    """One phrase that follows "band:"."""


class Coefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    runtime: dict[str, dict[str, Runtime]]
    """By backend, then by kind of device."""
    xla: dict[str, Overlap]
    """By kind of device, by catalog device, or by kind and `-learned`, for learned positions."""
    speed: dict[str, Speed]
    """By kind of device, or by kind and backend (`cpu-jax`)."""
    made_by: str
    exact: dict[str, dict[str, Certainty]] = {}
    """By backend, then by kind of device; absent if nothing was measured."""


@lru_cache(maxsize=1)
def coefficients() -> Coefficients:
    """The numbers shipped with this version."""
    data = files("memconsole.memory").joinpath("coefficients.json").read_bytes()
    return typed_json.decode(data, Coefficients)


@lru_cache(maxsize=128)
def runtime(backend: str, kind: str, device: str = "") -> Runtime:
    """Costs of `backend` on a `kind` of device; `device` is its catalog name, if it has one. An unknown backend gets
    torch's numbers."""
    kinds = coefficients().runtime.get(backend) or coefficients().runtime["torch"]
    costs = kinds[kind] if kind in kinds else kinds["cpu"]
    return msgspec.structs.replace(
        costs,
        workspace_bytes=costs.workspaces.get(device, costs.workspace_bytes),
        context_bytes=costs.contexts.get(device, costs.context_bytes),
    )


def certainty(backend: str, kind: str) -> Certainty | None:
    """Measured error of exact numbers of `backend` on a `kind` of device; None if not measured."""
    return coefficients().exact.get(backend, {}).get(kind)


def speed(kind: str, backend: str) -> Speed:
    """The shares of the peak rates that `backend` reaches on a `kind` of device."""
    speeds = coefficients().speed
    return speeds.get(f"{kind}-{backend}") or speeds.get(kind) or speeds["cpu"]


def xla(kind: str, device: str = "", *, learned_positions: bool = False) -> Overlap:
    """How XLA's temporaries overlap on a `kind` of device. Some catalog devices have their own numbers, and so
    have models with learned positions (GPT-2) on a GPU."""
    overlaps = coefficients().xla
    kind = kind if kind in overlaps else "gpu"
    learned = f"{kind}-learned" if learned_positions else kind
    return overlaps.get(device) or overlaps.get(learned) or overlaps[kind]
