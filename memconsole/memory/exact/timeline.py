"""Exact memory of a plan, as a trace or a compiler found it: the records a tracer sends to the console."""

from __future__ import annotations

import msgspec


class ExactPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes at the moment of one phase when most are live."""

    total_bytes: int
    components: dict[str, int] = {}
    """Bytes of each component that the tracer could identify, by its name in `table.COMPONENTS`. The rest of
    `total_bytes` belongs to the other components together."""


class Exact(msgspec.Struct, frozen=True, kw_only=True):
    """Traced or compiled memory of one plan on one kind of device."""

    phases: dict[str, ExactPhase]
    """By phase name, as in the memory table. If the training step was compiled as one program, there is one number for
    the whole step. It is stored under `program_phase`, and the step's other phases are absent."""
    program_phase: str = ""
    reserved_bytes: int | None = None
    """What the framework's allocator would reserve; None if the allocator was not replayed."""
    least_bytes: int | None = None
    """The smallest allocator capacity in which the step completes; None if not searched."""
    host_bytes: int = 0
    """Bytes the program keeps in host memory (offloaded state and activations)."""
    source: str
    """The tracer or compiler with its version: "torch 2.13.0, traced" or "XLA 0.10.2 for TPU v5e"."""
    caveat: str = ""
    """What may differ on the real device, in one sentence."""
    out_of_memory: bool = False
    """True if the compiler refused the program because it needs more memory than the device has. The total is the
    size the compiler reported."""
    seconds: float = 0.0
    """How long the trace or the compilation took."""


class AffineMoment(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes at one moment of a phase. Each tuple holds one coefficient for each size in `affine.TERMS`; the
    bytes are the sum of the products."""

    total: tuple[int, ...]
    components: dict[str, tuple[int, ...]]
    """Parts of the total, by their names in `table.COMPONENTS`."""


class AffineTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Every moment of a plan's step that can be the peak of its phase, at any batch size and length that
    `affine.covers` accepts. `affine.evaluate` turns it into an `Exact`."""

    key: str
    """`affine.structure_key` of the plans it is valid for."""
    phases: dict[str, tuple[AffineMoment, ...]]
    only: tuple[int, int] | None = None
    """(micro-batch, length) if the timeline is valid for these sizes alone, because the trace could not tell which
    size a tensor depends on; else None."""
    reserved_share: float | None = None
    """Reserved bytes divided by the live peak, from a replay of the allocator at the traced sizes."""
    source: str
    caveat: str = ""


class TracerQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a tracer's standard input (JSON)."""

    id: int
    plan: str
    """The plan file's text."""
    kind: str
    """cpu | gpu | rocm | apple | tpu"""
    target: str = ""
    """Catalog name of the device. Empty for a device of this machine that the catalog lacks, or that a tracer may open."""
    urgent: bool = True
    """False for plans one key press away from the current plan. They wait, and a newer urgent question cancels them."""


class TracerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a tracer's standard output (JSON)."""

    id: int
    exact: Exact | None = None
    timeline: AffineTimeline | None = None
    """Exact numbers for other batch sizes and lengths, if the tracer can derive them."""
    problem: str = ""
    """Why there is no result, in one sentence that says what to install or change."""
