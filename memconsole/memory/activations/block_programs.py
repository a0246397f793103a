"""The bytes that a block of the torch decoder and the final norm hold at their peak moments, from stored programs.

A program lists the live bytes of each moment as sums of products of sizes, such as 4·B·S·h.
`tests/accuracy/block_programs.py` traces them on the real modules and writes the files
in `programs/`, one for each structure of a block.
"""

from __future__ import annotations

import gzip
from functools import lru_cache
from importlib.resources import files

import msgspec

from memconsole import typed_json
from memconsole.memory.activations import adapted, general
from memconsole.memory.activations.kernels import (
    Kernels,
    Part,
    kernels_of_choice,
    program_name,
    structure,
    updating_bytes,
)
from memconsole.memory.state.gradient_flow import flow_of
from memconsole.memory.state.sizes import sizes
from memconsole.plan.machine.triton_kinds import TRITON_KINDS
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.tiles import tile_tokens
from memconsole.plan.plan import Checkpointing, OptimizeChoice

DECODED_CPU, DECODED_DEVICE = 2**17, 2**22
"""Elements that have fp32 temporaries when a matrix is decoded: `CPU_SLICE` and `DEVICE_SLICE` of
`memconsole_torch.models.codes`. The Triton kernel needs none."""


# gc=False here and below: a console keeps some hundred thousand of these records, which refer to nothing that could form a
# cycle. A garbage collection that looked through them would hold up a key press for a quarter of a second.
class Size(msgspec.Struct, frozen=True, gc=False):
    """Bytes: `constant + token * tokens + score * tokens * length + square * length² + row * rows`."""

    constant: int = 0
    token: int = 0
    score: int = 0
    square: int = 0
    row: int = 0

    def plus_per_token(self, bytes_: int) -> Size:
        """This size with `bytes_` more bytes per token."""
        return Size(self.constant, self.token + bytes_, self.score, self.square, self.row)

    def bytes(self, tokens: int, scores: int) -> int:
        """`scores`: tokens times length."""
        total = self.constant + self.token * tokens + self.score * scores
        if self.square or self.row:
            length = scores // tokens
            total += self.square * length**2 + self.row * (tokens // length)
        return total


NOTHING = Size()


class Live(msgspec.Struct, frozen=True, gc=False):
    """The live bytes at one moment, by kind."""

    activations: Size
    """Computed or recomputed in a forward pass."""
    workspace: Size
    """Temporaries of the backward pass."""
    gradients: int
    copies: int
    """16-bit copies of weights."""
    total: Size

    @staticmethod
    def of(
        activations: Size, workspace: Size = NOTHING, gradients: int = 0, copies: int = 0
    ) -> Live:
        """The moment with these bytes, and their total."""
        a, w = activations, workspace
        total = Size(
            a.constant + w.constant + gradients + copies,
            a.token + w.token,
            a.score + w.score,
            a.square + w.square,
            a.row + w.row,
        )
        return Live(activations, workspace, gradients, copies, total)


class Program(msgspec.Struct, frozen=True, gc=False):
    """Live bytes of one block. Its input counts from the forward to the backward pass."""

    forward: tuple[Live, ...]
    """Peak moments of the forward pass, the end included, when the output exists."""
    kept: Live
    """Bytes kept between the forward and the backward pass."""
    cast: int
    """Additional bytes of weight copies, until the forward context ends."""
    backward: tuple[Live, ...]
    """Peak moments of the backward pass, including kept activations and the gradient of the output."""
    adding: tuple[Live, ...]
    """Peak moments of the backward pass if gradients of weights are added to those of an earlier micro-batch."""
    gradients: int
    """Bytes of the weights' gradients that remain after the backward pass."""


Sum = tuple[tuple[int, int], ...]
"""Pairs: the index of a product of sizes, and its factor."""


class StoredMoment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Live bytes at one moment, by kind."""

    activations: Sum
    workspace: Sum
    gradients: Sum
    copies: Sum
    updated: Sum | None = None
    """The shape of the weight whose gradient is complete at this moment, one product of sizes for each side."""


class StoredProgram(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A program as stored: indices of moments. The program of an evaluation has only the moments of a forward pass."""

    forward: tuple[int, ...]
    cast: int = 0
    """The end of the forward pass, while copies of weights are still there."""
    kept: int = 0
    backward: tuple[int, ...] = ()
    freeing: tuple[int, ...] = ()
    """Peak moments of the backward pass if each gradient is used and freed as soon as it is complete."""
    end: int = 0


class StructurePrograms(msgspec.Struct, frozen=True):
    """All programs of one structure of a block."""

    sizes: tuple[str, ...]
    """Products of sizes, such as "B S h". The letters are those of `TOLD` in `tests/accuracy/trace_block.py`."""
    moments: tuple[StoredMoment, ...]
    programs: dict[str, StoredProgram]


@lru_cache(maxsize=64)
def structure_programs(name: str) -> StructurePrograms | None:
    """The programs of a structure; None if there are none."""
    file = files(__package__).joinpath("programs", f"{name}.json.gz")
    if not file.is_file():
        return None
    return typed_json.decode(gzip.decompress(file.read_bytes()), StructurePrograms)


def is_traced(a: Architecture) -> bool:
    """Whether there are programs for blocks of this structure. For others the general rule is used."""
    return structure_programs(structure(a)) is not None


@lru_cache(maxsize=2048)
def block_program(a: Architecture, kernels: Kernels) -> Program:
    """One decoder block."""
    return _program(a, kernels, "block")


@lru_cache(maxsize=2048)
def final_norm_program(a: Architecture, kernels: Kernels) -> Program:
    """The norm before the head, which is never checkpointed."""
    return _program(a, kernels, "norm")


@lru_cache(maxsize=2048)
def evaluated_block(a: Architecture, kernels: Kernels) -> tuple[Live, ...]:
    """Peak moments of a block that needs no gradient."""
    return _evaluated(a, kernels, "evaluated block")


@lru_cache(maxsize=2048)
def evaluated_norm(a: Architecture, kernels: Kernels) -> tuple[Live, ...]:
    return _evaluated(a, kernels, "evaluated norm")


def kept_per_token(
    a: Architecture,
    choice: OptimizeChoice,
    checkpointing: Checkpointing,
    kind: str,
    frozen: bool,
    *,
    tiled: bool = False,
) -> Size:
    """Activations that one block keeps under `checkpointing`. `tiled`: its MLP is computed in tiles."""
    kernels = kernels_of_choice(choice, checkpointing, kind, frozen=frozen)
    if tiled:
        kernels = msgspec.structs.replace(kernels, tile=tile_tokens(a.hidden_size))
    return block_program(a, kernels).kept.activations


def _program(a: Architecture, k: Kernels, part: Part) -> Program:
    stored = structure_programs(structure(a))
    if stored is None:
        return _general_program(a, k)
    program, values = stored.programs[program_name(part, k)], _values_of(a, k)

    def moment(index: int) -> Live:
        return _live(stored.moments[index], values, k)

    def peaks(indices: tuple[int, ...], missing: int) -> tuple[Live, ...]:
        """The moments with the bytes of dropout, but without the `missing` bytes per token of missing adapters."""
        moments = (with_workspace(moment(index), k.dropout_bytes) for index in indices)
        return tuple(without_activations(live, missing) for live in moments)

    kept = without_activations(moment(program.kept), adapted.not_kept(a, k))
    freeing = peaks(program.freeing, adapted.not_read(a, k))
    return Program(
        forward=peaks(program.forward, adapted.not_made(a, k)),
        kept=kept,
        cast=moment(program.cast).copies - kept.copies,
        backward=freeing if k.stepping else peaks(program.backward, adapted.not_read(a, k)),
        adding=freeing,
        gradients=0 if k.stepping else int(moment(program.end).gradients * adapted.share(a, k)),
    )


def _evaluated(a: Architecture, k: Kernels, part: Part) -> tuple[Live, ...]:
    stored = structure_programs(structure(a))
    if stored is None:
        return _general_program(a, k).forward
    values, missing = _values_of(a, k), adapted.not_made(a, k)
    moments = (stored.moments[index] for index in stored.programs[program_name(part, k)].forward)
    return tuple(without_activations(_live(moment, values, k), missing) for moment in moments)


Values = tuple[tuple[int, int, int], ...]
"""For each product of sizes: the index of the field of `Size` that it belongs to, its value without rows and positions, and
how many matrices a weight has whose first side it is."""


def _values_of(a: Architecture, k: Kernels) -> Values:
    return _values(a, k.rank, k.kind, (k.queries, k.rows, k.tile))


@lru_cache(maxsize=1024)
def _values(a: Architecture, rank: int, kind: str, at_a_time: tuple[int, int, int]) -> Values:
    """The values of the products of sizes in the programs of `a`. `at_a_time`: how many queries of attention are computed
    at a time, how many rows of an expert, and how many tokens of the MLP."""
    stored = structure_programs(structure(a))
    assert stored is not None
    h, f = a.hidden_size, a.intermediate_size
    value = {
        "h": h,
        "f": f,
        "k": a.kv_heads,
        "g": a.heads // a.kv_heads,
        "d": a.head_size,
        "w": -(-a.head_size // 32) * 32,
        "r": rank,
        "q": at_a_time[0],
        "n": at_a_time[1],
        "m": at_a_time[2],
        "e": a.experts,
        "t": a.experts_per_token,
        "c": min(_decoded_at_a_time(kind), h * max(f, a.query_width)),
    }
    result = []
    for product in stored.sizes:
        factor = 1
        letters = product.split()
        for letter in letters:
            factor *= value.get(letter, 1)
        several = "e" in letters and len(letters) > 1
        result.append((field(product), factor, a.experts if several else 1))
    return tuple(result)


def _decoded_at_a_time(kind: str) -> int:
    """Elements of a coded matrix that have fp32 temporaries at a time."""
    if kind in TRITON_KINDS:
        return 0
    return DECODED_CPU if kind == "cpu" else DECODED_DEVICE


def field(product: str) -> int:
    """The field of `Size` that a product of sizes belongs to. Raises `ValueError` if there is none."""
    rows, positions = product.count("B"), product.count("S") + product.count("P")
    return ((0, 0), (1, 1), (1, 2), (0, 2), (1, 0)).index((rows, positions))


def _live(moment: StoredMoment, values: Values, k: Kernels) -> Live:
    """A stored moment in bytes, with the temporaries of the weight that is updated at it."""
    activations, workspace = ([0] * len(Size.__struct_fields__) for _ in range(2))
    for terms, into in (moment.activations, activations), (moment.workspace, workspace):
        for index, factor in terms:
            at, value, _ = values[index]
            into[at] += factor * value
    gradients = sum(factor * values[index][1] for index, factor in moment.gradients)
    copies = sum(factor * values[index][1] for index, factor in moment.copies)
    if moment.updated is not None and k.stepping:
        shape = tuple(factor * values[index][1] for index, factor in moment.updated)
        matrices = values[moment.updated[0][0]][2]
        workspace[0] += updating_bytes(k, shape, matrices=matrices)
    return Live.of(Size(*activations), Size(*workspace), gradients, copies)


def with_workspace(moment: Live, bytes_per_token: int) -> Live:
    """The moment with more workspace, such as what dropout needs while it makes a mask."""
    if not bytes_per_token:
        return moment
    workspace = moment.workspace.plus_per_token(bytes_per_token)
    return Live.of(moment.activations, workspace, moment.gradients, moment.copies)


def without_activations(moment: Live, bytes_per_token: int) -> Live:
    """The moment without some of its activations."""
    if not bytes_per_token:
        return moment
    activations = moment.activations.plus_per_token(-bytes_per_token)
    return Live.of(activations, moment.workspace, moment.gradients, moment.copies)


def _general_program(a: Architecture, k: Kernels) -> Program:
    """A block of an unknown structure, or its norm, by the general rule."""
    rule, block, matrices = general.block_of(a), sizes(a).block, sizes(a).block_matrices
    flow = flow_of(a, (), adapted=False)
    if k.frozen:
        flow = msgspec.structs.replace(flow, inputs=0)
    without_checkpointing = general.kept_bytes(a, flow, "none", k.compute) // a.layers
    kept = general.kept_bytes(a, flow, k.checkpointing, k.compute) // a.layers
    recomputed = 0 if k.checkpointing == "none" else without_checkpointing
    temporary = k.compute * rule.widest
    copies = 2 * matrices if k.compute == 2 and not (k.rounded or k.frozen) else 0
    gradients = 4 * (k.rank * block.adapter_width if k.frozen else block.elements)
    activations = Size(token=kept + recomputed)
    backward = Live.of(activations, Size(token=2 * temporary), gradients, copies)
    added = Live.of(activations, Size(gradients, 2 * temporary), 0, copies)
    workspace = Size(token=temporary + 4 * rule.width)
    return Program(
        forward=(Live.of(Size(token=kept), workspace, 0, copies),),
        kept=Live.of(Size(token=kept), NOTHING, 0, copies),
        cast=0,
        backward=(added if k.stepping else backward,),
        adding=(added,),
        gradients=0 if k.stepping else gradients,
    )
