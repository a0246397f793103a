"""Turns the trace of a block into a program: the few moments that can be its peak at any sizes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memconsole.memory.activations.block_programs import (
    StoredMoment,
    StoredProgram,
    StructurePrograms,
    field,
)
from memconsole.memory.activations.kernels import CAPPED_QUERIES, EXPERT_ROWS, Kernels, Part
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.tiles import tile_tokens
from memconsole_torch.tracing.trace_liveness import Storage
from tests.accuracy.trace_block import BlockTracer, Completed, Term, Trace, term

KINDS = 4
ACTIVATIONS, WORKSPACE, GRADIENTS, COPIES = range(KINDS)
SAMPLES = 600
"""Random sizes at which moments are compared."""
TOLERANCE = 1e-3
"""A moment is left out if at each of these sizes another moment, which is kept, has as many bytes or falls short by
less than this share."""


class Moment(NamedTuple):
    """Live bytes at one moment: by kind, sums of products of sizes."""

    kinds: tuple[tuple[Term, ...], ...]
    updated: tuple[Term, ...] | None = None
    """The sides of the weight whose gradient is complete at this moment."""


class BlockProgram(NamedTuple):
    """The moments of a program, as in `memconsole.memory.activations.block_programs.StoredProgram`."""

    forward: tuple[Moment, ...]
    cast: Moment | None = None
    kept: Moment | None = None
    backward: tuple[Moment, ...] = ()
    freeing: tuple[Moment, ...] = ()
    end: Moment | None = None


def traced_program(tracer: BlockTracer, a: Architecture, k: Kernels, part: Part) -> BlockProgram:
    """The program of a block with the structure of `a`."""
    trace = tracer.trace(a, k, part)
    staying = _by_phase(_moments(trace, freeing=False))
    if not trace.recorded:
        return BlockProgram(widest(staying["forward"]))
    return BlockProgram(
        forward=widest(staying["forward"] + staying["cast"]),
        cast=staying["cast"][0],
        kept=staying["kept"][0],
        backward=widest(staying["backward"]),
        freeing=widest(_by_phase(_moments(trace, freeing=True))["backward"]),
        end=staying["end"][0],
    )


def _by_phase(moments: Iterable[tuple[str, Moment]]) -> dict[str, list[Moment]]:
    found: dict[str, list[Moment]] = {}
    for phase, moment in moments:
        found.setdefault(phase, []).append(moment)
    return found


def _moments(trace: Trace, *, freeing: bool) -> Iterator[tuple[str, Moment]]:
    """The phase and the live bytes at the start of each phase and at each local maximum.

    `passing`: each gradient of a weight is freed as soon as it is complete, and is a temporary until then.
    """
    live = trace.live
    complete: dict[int, list[Completed]] = {}
    for completed in trace.completed:
        complete.setdefault(completed.event, []).append(completed)
    gone = {c.storage for c in trace.completed} if freeing else set()
    levels: list[dict[str, int]] = [{} for _ in range(KINDS)]
    phase, growing = "build", False

    def change(index: int, sign: int) -> None:
        storage = live.storages[index]
        if storage.nbytes:
            kind = WORKSPACE if index in gone else _kind(storage)
            factor, product = term(storage.nbytes)
            levels[kind][product] = levels[kind].get(product, 0) + sign * factor

    def moment(completed: Completed | None = None) -> tuple[str, Moment]:
        kinds = tuple(
            tuple(Term(level[product], product) for product in sorted(level) if level[product])
            for level in levels
        )
        sides = None if completed is None else tuple(term(side) for side in completed.shape)
        return phase, Moment(kinds, sides)

    for number, event in enumerate(live.events):
        for done in complete.get(number, ()) if freeing else ():
            yield moment(done)
            change(done.storage, -1)
            growing = False
        if isinstance(event, str):
            if growing:
                yield moment()
            phase, growing = event, True
            if phase != "build":
                yield moment()
            continue
        index = abs(event) - 1
        if event < 0 and growing:
            yield moment()
        growing = event > 0
        if event > 0 or index not in gone:
            change(index, 1 if event > 0 else -1)


def _kind(storage: Storage) -> int:
    if storage.component == "gradients":
        return GRADIENTS
    if storage.component == "workspace":
        return WORKSPACE
    if storage.copy_of is not None and storage.copy_of.component == "weights":
        return COPIES
    made = storage.phase == "forward" or (storage.phase == "backward" and storage.recomputed)
    return ACTIVATIONS if made else WORKSPACE


def widest(moments: list[Moment]) -> tuple[Moment, ...]:
    """The few of `moments` that can be the largest: at all sizes one of them is the peak, within `TOLERANCE`."""
    distinct = list(dict.fromkeys(moments))
    totals = np.array([_totals(moment) for moment in distinct])
    good = totals >= (1 - TOLERANCE) * totals.max(axis=0)
    left = np.ones(SAMPLES, dtype=bool)
    chosen = []
    while left.any():
        best = int((good & left).sum(axis=1).argmax())
        chosen.append(distinct[best])
        left &= ~good[best]
    return tuple(chosen)


def _totals(moment: Moment) -> NDArray[np.float64]:
    """The bytes of a moment at each of the random sizes."""
    found = np.zeros(SAMPLES)
    for terms in moment.kinds:
        for factor, product in terms:
            found += factor * _sampled(product)
    if moment.updated is not None:
        weight = np.ones(SAMPLES)
        for factor, product in moment.updated:
            weight *= factor * _sampled(product)
        found += _SIZES["update"] * weight
    return found


def _sampled(product: str) -> NDArray[np.float64]:
    known = _PRODUCTS.get(product)
    if known is None:
        field(product)  # raises `ValueError` if programs do not know this product of sizes
        known = np.ones(SAMPLES)
        for letter in product.split():
            known = known * _SIZES[letter]
        _PRODUCTS[product] = known
    return known


_PRODUCTS: dict[str, NDArray[np.float64]] = {}


def _sizes() -> dict[str, NDArray[np.float64]]:
    """Random sizes of models and batches. "update": bytes of an update for each element of a weight."""
    rng, of_experts, rows = random.Random(5), random.Random(6), []
    for _ in range(SAMPLES):
        hidden = 64 * round(2 ** rng.uniform(0, 7))
        inner = 8 * round(hidden * rng.uniform(1, 8) / 8)
        keys, groups = rng.choice(((1, 8), (1, 4), (2, 4), (3, 3), (8, 4), (8, 3), (16, 2)))
        size = rng.choice((16, 32, 64, 80, 128, 256))
        length = int(2 ** rng.uniform(3, 13))
        rows.append(
            {
                "B": rng.choice((1, 1, 2, 3, 4, 8, 16, 64, 128)),
                "S": length,
                "P": length,
                "h": hidden,
                "f": inner,
                "k": keys,
                "g": groups,
                "d": size,
                "w": -(-size // 32) * 32,
                "r": rng.choice((1, 8, 16, 64)),
                "q": min(CAPPED_QUERIES, length),
                "c": min(rng.choice((2**17, 2**22)), hidden * inner),
                "update": rng.choice((0, 0, 2, 8)),
                "e": of_experts.choice((4, 8, 16, 64, 128)),
                "t": of_experts.choice((1, 2, 4, 8)),
            }
        )
        rows[-1]["n"] = min(EXPERT_ROWS, rows[-1]["B"] * length)
        rows[-1]["m"] = min(tile_tokens(hidden), rows[-1]["B"] * length)
    return {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}


_SIZES = _sizes()


def packed(programs: Mapping[str, BlockProgram]) -> StructurePrograms:
    """Programs by name, as they are stored: each size and each moment once."""
    products: dict[str, int] = {}
    moments: dict[StoredMoment, int] = {}

    def pairs(terms: tuple[Term, ...]) -> tuple[tuple[int, int], ...]:
        return tuple((products.setdefault(t.sizes, len(products)), t.factor) for t in terms)

    def index(moment: Moment | None) -> int:
        if moment is None:
            return 0
        updated = None if moment.updated is None else pairs(moment.updated)
        activations, workspace, gradients, copies = map(pairs, moment.kinds)
        one = StoredMoment(activations, workspace, gradients, copies, updated)
        return moments.setdefault(one, len(moments))

    found = {}
    for name, p in programs.items():
        found[name] = StoredProgram(
            forward=tuple(map(index, p.forward)),
            cast=index(p.cast),
            kept=index(p.kept),
            backward=tuple(map(index, p.backward)),
            freeing=tuple(map(index, p.freeing)),
            end=index(p.end),
        )
    return StructurePrograms(tuple(products), tuple(moments), found)


def unpacked(stored: StructurePrograms, name: str) -> BlockProgram:
    """One of the stored programs."""

    def terms(pairs: tuple[tuple[int, int], ...]) -> tuple[Term, ...]:
        return tuple(Term(factor, stored.sizes[index]) for index, factor in pairs)

    def moment(index: int) -> Moment:
        m = stored.moments[index]
        kinds = tuple(map(terms, (m.activations, m.workspace, m.gradients, m.copies)))
        return Moment(kinds, None if m.updated is None else terms(m.updated))

    p = stored.programs[name]
    forward = tuple(map(moment, p.forward))
    if not p.backward:
        return BlockProgram(forward)
    return BlockProgram(
        forward=forward,
        cast=moment(p.cast),
        kept=moment(p.kept),
        backward=tuple(map(moment, p.backward)),
        freeing=tuple(map(moment, p.freeing)),
        end=moment(p.end),
    )
