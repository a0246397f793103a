"""An autograd that counts bytes instead of computing: the live bytes at each operation of a torch program.

A program on the tape has the same operations, order and local variables as the real one. It therefore holds each
storage exactly as long as torch does: a `Storage` counts until its last reference is gone. References are the
program's variables, the nodes that saved it for the backward pass, and gradients that wait for their node. A size has
a constant part, a part per token, and a part per token and key, so one run is valid for every batch size and length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

ACTIVATIONS, WORKSPACE, GRADIENTS, COPIES = range(4)
"""What a storage counts as: activations (computed or recomputed in a forward pass), temporaries of the backward
pass, gradients of weights, 16-bit copies of weights."""
FIELD = 56
"""Bits of one count. All counts of a tape are fields of one integer, so one addition updates them all. Each kind has
three counts: constant bytes, bytes per token, and bytes per token and key."""
MASK = (1 << FIELD) - 1


class Size(NamedTuple):
    """Bytes: `constant + token * tokens + score * tokens * keys`."""

    constant: int = 0
    token: int = 0
    score: int = 0

    def bytes(self, tokens: int, scores: int) -> int:
        return self.constant + self.token * tokens + self.score * scores


class Live(NamedTuple):
    """The live bytes at one moment, by kind."""

    activations: Size
    workspace: Size
    gradients: int
    copies: int
    total: Size


class Storage:
    """The bytes of one tensor. The tape counts them until nothing refers to this object."""

    __slots__ = ("_packed", "_tape")

    def __init__(self, tape: Tape, packed: int) -> None:
        self._tape, self._packed = tape, packed
        tape.live += packed
        tape.rising = True

    def __del__(self) -> None:
        self._release()

    def becomes(self, kind: int) -> None:
        """Change the kind from `WORKSPACE` to another."""
        self._release()
        self._packed <<= (kind - WORKSPACE) * 3 * FIELD
        self._tape.live += self._packed

    def _release(self) -> None:
        tape = self._tape
        if tape.rising:
            tape.marks.add(tape.live)
            tape.rising = False
        tape.live -= self._packed


class Slot:
    """Accumulates the gradient of one tensor."""

    __slots__ = ("gradient", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self.gradient: Storage | None = None


class Tensor:
    """A tensor of `width` elements of `element` bytes per token. `slot` is None if it needs no gradient."""

    __slots__ = ("element", "slot", "storage", "width")

    def __init__(self, storage: Storage, width: int, element: int, slot: Slot | None) -> None:
        self.storage, self.width, self.element, self.slot = storage, width, element, slot


Contribution = tuple[Slot, Storage]
Backward = Callable[[Storage], list[Contribution]]


class Tape:
    """Counts live bytes and keeps the moments that can be a peak."""

    def __init__(self) -> None:
        self.live = 0
        self.marks: set[int] = set()
        """Counts at the moments just before something was freed."""
        self.rising = False
        self.kind = ACTIVATIONS
        self.recording = True
        """Whether operations save tensors for the backward pass."""
        self.saves = 0
        """Number of operations that saved tensors, or would have with recording on."""
        self.most_saves: int | None = None
        """Recomputation stops after this many saving operations; later operations allocate nothing."""
        self._nodes: list[tuple[Slot, Backward]] = []
        """Each operation's backward function. It also holds the storages that the operation saved."""

    @property
    def stopped(self) -> bool:
        return self.most_saves is not None and self.saves >= self.most_saves

    def new(self, size: Size, kind: int | None = None) -> Storage:
        """A storage of `size`. Without `kind` it gets the kind of the current pass."""
        if self.most_saves is not None and self.stopped:
            return Storage(self, 0)
        constant, token, score = size
        packed = constant | token << FIELD | score << 2 * FIELD
        return Storage(self, packed << 3 * FIELD * (self.kind if kind is None else kind))

    def saved(self) -> bool:
        """Count an operation that saves tensors. True if they are really kept."""
        self.saves += 1
        return self.recording

    def record(self, output: Slot, run: Backward) -> None:
        if self.recording:
            self._nodes.append((output, run))

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """A context in which operations save nothing: evaluation, or the forward pass of a checkpointed block."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def backward(self) -> None:
        """Run all nodes in reverse order. After a node has run, its gradient and its saved tensors are freed. A second
        contribution to a gradient allocates a third tensor for the sum."""
        while self._nodes:
            output, run = self._nodes.pop()
            gradient, output.gradient = output.gradient, None
            if gradient is None:
                continue
            found = run(gradient)
            del gradient, run
            while found:
                self._gather(*found.pop(0))

    def _gather(self, slot: Slot, part: Storage) -> None:
        slot.gradient = part if slot.gradient is None else self.new(slot.size)

    def now(self) -> Live:
        return unpacked(self.live)

    def take_peaks(self) -> set[int]:
        """Return the moments since the last call as packed counts, and clear them."""
        marks = self.marks | {self.live}
        self.marks, self.rising = set(), False
        return marks


def widest(marks: set[int], *, without_gradients: bool = False) -> tuple[Live, ...]:
    """The moments whose total is not exceeded in every part by another moment's total."""
    totals: dict[int, int] = {}
    for mark in marks:
        live = mark & ~_GRADIENTS if without_gradients else mark
        total = (live & _KIND) + (live >> _WIDTH & _KIND) + (live >> 3 * _WIDTH)
        totals[total + (live >> 2 * _WIDTH & _KIND)] = live
    # Scores are the highest field, then tokens, so totals are sorted by descending scores.
    ordered = sorted(totals, reverse=True)
    found, most = [], -1
    if (
        ordered[0] >> 2 * FIELD == 0
    ):  # without scores, a total with fewer bytes per token must have more constant bytes
        for total in ordered:
            if total & MASK > most:
                most = total & MASK
                found.append(unpacked(totals[total]))
        return tuple(found)
    front: list[tuple[int, int]] = []
    for total in ordered:
        token, constant = total >> FIELD & MASK, total & MASK
        if not any(token <= other and constant <= most for other, most in front):
            front.append((token, constant))
            found.append(unpacked(totals[total]))
    return tuple(found)


_WIDTH = 3 * FIELD
_KIND = (1 << _WIDTH) - 1
_GRADIENTS = _KIND << GRADIENTS * _WIDTH


def unpacked(packed: int) -> Live:
    """Unpack the counts of one moment."""
    constants, tokens, scores = [], [], []
    for _ in range(4):
        constants.append(packed & MASK)
        tokens.append(packed >> FIELD & MASK)
        scores.append(packed >> 2 * FIELD & MASK)
        packed >>= _WIDTH
    return Live(
        Size(constants[0], tokens[0], scores[0]),
        Size(constants[1], tokens[1], scores[1]),
        constants[2],
        constants[3],
        Size(sum(constants), sum(tokens), sum(scores)),
    )
