"""What a trace or a compiler found out about a plan's memory: the records a tracer sends to the console."""

from __future__ import annotations

import msgspec


class ExactPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes at the largest moment of one phase."""

    total_bytes: int
    components: dict[str, int] = {}
    """Bytes of the components that were told apart, by their names in `table.COMPONENTS`; what is left
    of the total is theirs whom the tracer could not tell apart."""


class Exact(msgspec.Struct, frozen=True, kw_only=True):
    """Traced or compiled memory of one plan on one kind of device."""

    phases: dict[str, ExactPhase]
    """By the names of the table's phases. A program compiled as a whole has one number for its whole training
    step: it stands under `program_phase`, and no other phase of the step is here."""
    program_phase: str = ""
    reserved_bytes: int | None = None
    """What the framework's allocator would hold; None where nothing replayed it."""
    least_bytes: int | None = None
    """The smallest allocator capacity in which the step completes; None where not searched."""
    host_bytes: int = 0
    """Bytes the program keeps in host memory (offloaded state and activations)."""
    source: str
    """What found this, with versions: "torch 2.13.0, traced" or "XLA 0.10.2 for TPU v5e"."""
    caveat: str = ""
    """What may differ on the real device, in one sentence."""
    out_of_memory: bool = False
    """The compiler refused the program for this device; the total is what it said it needs."""
    seconds: float = 0.0
    """What finding it took."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes at one moment of a phase, each a sum of coefficients times the sizes in `affine.TERMS`."""

    total: tuple[int, ...]
    components: dict[str, tuple[int, ...]]
    """Parts of the total, by their names in `table.COMPONENTS`."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Every moment of a plan's step that can be its phase's largest, for any batch and length that
    `affine.covers`; `affine.evaluate` makes an `Exact` of it."""

    key: str
    """`affine.structure_key` of the plans that it speaks for."""
    phases: dict[str, tuple[Moment, ...]]
    only: tuple[int, int] | None = None
    """The one micro-batch and length it holds for, where sizes could not be told apart."""
    reserved_share: float | None = None
    """The allocator's bytes over the live peak, as replayed at the sizes that were asked for."""
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
    """The catalog device compiled for, as its name in the catalog; empty for this machine's own."""
    urgent: bool = True
    """False for neighbours of the present plan: they wait, and a newer urgent question drops them."""


class TracerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a tracer's standard output (JSON)."""

    id: int
    exact: Exact | None = None
    timeline: Timeline | None = None
    """The same for other batches and lengths, from tracers that know."""
    problem: str = ""
    """Why there is none, in one sentence that says what to install or change."""
