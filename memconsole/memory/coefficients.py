"""Measured numbers the formulas need, read once from coefficients.json; each entry names its source."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import msgspec

from memconsole import typed_json


class Runtime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a backend costs on one kind of device apart from the plan's own tensors."""

    context_bytes: int
    """Charged to the process by the driver, outside the framework's allocator."""
    workspace_bytes: int
    """Inside the allocator and independent of the plan: matmul workspaces; on a CPU the growth of
    thread pools, lazily loaded code and compiled programs."""
    packed_bytes: int = 0
    """Most that a CPU's fp32 matmuls keep of operands they repacked (MKL holds on to its buffers)."""
    kernels_16_bytes: int = 0
    """What a CPU's 16-bit matmuls keep instead: oneDNN's compiled kernels, one for each shape."""
    reserve_share: float
    """Held by the framework's allocator over the live peak, as a share of it."""
    reserve_share_16: float | None = None
    """The same where matmuls are in 16 bits; None: no other."""
    reserve_bytes: int = 0
    """Held besides, whatever the peak: pages in part used."""
    host_bytes: int
    """Resident memory of the trainer's process tree before the model is built."""
    compiler_bytes: int = 0
    """Host memory that torch.compile's modules and what it compiled take in the trainer."""
    context_range: tuple[int, int] | None = None
    """Least and most that drivers were seen to charge; None: the band is of them, too."""
    band: tuple[float, float]
    """Low and high bound of the allocator's bytes, as factors."""
    source: str

    def reserved_bytes(self, peak: int, *, sixteen_bit: bool) -> int:
        """What the allocator holds for a live peak of `peak` bytes."""
        share = self.reserve_share
        if sixteen_bit and self.reserve_share_16 is not None:
            share = self.reserve_share_16
        return peak + int(peak * share) + self.reserve_bytes

    def band_bytes(self, low: float, high: float) -> tuple[int, int]:
        """Device bytes of an allocator that holds `low` to `high`, with the driver's least and most."""
        least, most = self.context_range or (
            self.context_bytes * self.band[0],
            self.context_bytes * self.band[1],
        )
        return int(low + least), int(high + most)


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a device's peak rates a training step reaches."""

    flops_share: float
    bandwidth_share: float
    step_overhead_seconds: float
    """Per micro-batch and layer: kernel launches and the interpreter."""
    source: str


class Overlap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many copies of each temporary XLA's plan for a kind of device holds at once."""

    logits: float
    """Whole logits, counted in fp32."""
    logits_16: float
    """The same where matmuls are in 16 bits."""
    logits_16_padded: float
    """The same where the vocabulary is padded as well."""
    chunk: float
    """A chunk's logits, counted in fp32."""
    chunk_16: float
    padded_head: float
    """The head's matrix, where its rows are padded for a GPU's matmuls."""
    cast_head: float
    """The head's matrix in 16 bits, where matmuls are."""
    early_blocks: float
    """Gradients of all blocks that already have their room while the loss runs."""
    loss_stream: float
    """The fp32 residual stream, while the loss runs."""
    mlp: float
    """The MLP's inner width, in the backward pass of a block's MLP."""
    mlp_16: float
    """The same where matmuls are in 16 bits."""
    mlp_stream: float
    """The fp32 residual stream, there."""
    scores: float
    """A chunk's fp32 attention scores, in the backward pass of a block's attention."""
    heads: float
    """The queries' width, there."""
    heads_stream: float
    again: float
    """What a checkpointed block makes again in fp32, in its backward pass: TPUs round to 16 bits what only a
    product reads."""
    layer: float
    """One block's matrices, cut from their stacks, in its backward pass."""
    rounded_blocks: float
    """All blocks' matrices stored in fp32, in 16 bits: a loop that reads them rounded may be given a rounded copy."""
    slice: float
    """Everything one block kept, in the backward pass of a block that is not checkpointed."""
    source: str


class Certainty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far exact numbers were found from the truth on a kind of device, as low and high factors."""

    allocated: tuple[float, float]
    """Of live bytes traced or compiled."""
    reserved: tuple[float, float] = (1.0, 1.0)
    """Of the allocator's bytes, replayed for the plan itself."""
    unreplayed: tuple[float, float] = (1.0, 1.0)
    """Of the allocator's bytes where the plan itself was not replayed."""
    source: str
    """One phrase that follows "band:"."""


class Coefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    runtime: dict[str, dict[str, Runtime]]
    """By backend, then by kind of device."""
    xla: dict[str, Overlap]
    """By kind of device."""
    speed: dict[str, Speed]
    """By kind of device."""
    made_by: str
    exact: dict[str, dict[str, Certainty]] = {}
    """By backend, then by kind of device; absent where nothing was measured."""


@lru_cache(maxsize=1)
def coefficients() -> Coefficients:
    """The numbers shipped with this version."""
    data = files("memconsole.memory").joinpath("coefficients.json").read_bytes()
    return typed_json.decode(data, Coefficients)


def runtime(backend: str, kind: str) -> Runtime:
    """Costs of `backend` on a `kind` of device; another backend is priced as torch."""
    kinds = coefficients().runtime.get(backend) or coefficients().runtime["torch"]
    return kinds[kind] if kind in kinds else kinds["cpu"]


def certainty(backend: str, kind: str) -> Certainty | None:
    """How sure exact numbers of `backend` on a `kind` of device are; None where that was not measured."""
    return coefficients().exact.get(backend, {}).get(kind)


def speed(kind: str) -> Speed:
    """Reached shares on a `kind` of device."""
    speeds = coefficients().speed
    return speeds[kind] if kind in speeds else speeds["cpu"]


def xla(kind: str, device: str = "") -> Overlap:
    """How XLA's temporaries overlap on a `kind` of device; on some devices of the catalog otherwise."""
    overlaps = coefficients().xla
    return overlaps.get(device) or overlaps.get(kind) or overlaps["gpu"]
