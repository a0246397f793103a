"""An autograd that counts bytes instead of computing: what is live at each operation of a torch program.

A program written against it, in the order and with the local names of the real one, holds each storage
exactly as long as torch does: a `Storage` counts until its last reference goes, references being those
of the program's own variables, of the nodes that saved it for the backward pass, and of gradients that
wait for their node. Sizes have a constant part, a part per token and a part per token and key, so that one
run of a program answers for every batch and length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

ACTIVATIONS, WORKSPACE, GRADIENTS, COPIES = range(4)
"""What a storage counts as: made in the forward pass (or again, under checkpointing), made in the backward
pass, gradients of weights, 16-bit copies of weights."""
FIELD = 56
"""Bits of one count. All counts of a tape are fields of one integer, so that one addition changes them:
per kind bytes that are constant, per token, and per token and key."""
MASK = (1 << FIELD) - 1


class Size(NamedTuple):
    """Bytes: `constant + token * tokens + score * tokens * keys`."""

    constant: int = 0
    token: int = 0
    score: int = 0

    def bytes(self, tokens: int, scores: int) -> int:
        return self.constant + self.token * tokens + self.score * scores


class Live(NamedTuple):
    """What is live at one moment, by what it counts as."""

    activations: Size
    workspace: Size
    gradients: int
    copies: int
    total: Size


class Storage:
    """Bytes of one tensor, counted by `tape` until nothing refers to it."""

    __slots__ = ("_packed", "_tape")

    def __init__(self, tape: Tape, packed: int) -> None:
        self._tape, self._packed = tape, packed
        tape.live += packed
        tape.rising = True

    def __del__(self) -> None:
        self._release()

    def becomes(self, kind: int) -> None:
        """Count as another kind, after having counted as `WORKSPACE`."""
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
    """Where the gradient of one tensor gathers."""

    __slots__ = ("gradient", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self.gradient: Storage | None = None


class Tensor:
    """A tensor of `width` elements of `element` bytes per token; `slot` is None where no gradient is wanted."""

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
        """Counts at moments behind which something was freed."""
        self.rising = False
        self.kind = ACTIVATIONS
        self.recording = True
        """Whether operations save for the backward pass."""
        self.saves = 0
        """Operations that saved, or would have."""
        self.most_saves: int | None = None
        """Recomputing ends at this many: what comes after it makes nothing."""
        self._nodes: list[tuple[Slot, Backward]] = []
        """Each operation's backward pass, which is also what holds the storages it saved."""

    @property
    def stopped(self) -> bool:
        return self.most_saves is not None and self.saves >= self.most_saves

    def new(self, size: Size, kind: int | None = None) -> Storage:
        """A storage of `size`, of the kind at hand unless another is named."""
        if self.most_saves is not None and self.stopped:
            return Storage(self, 0)
        constant, token, score = size
        packed = constant | token << FIELD | score << 2 * FIELD
        return Storage(self, packed << 3 * FIELD * (self.kind if kind is None else kind))

    def saved(self) -> bool:
        """Count an operation that saves; True where what it saves is really held."""
        self.saves += 1
        return self.recording

    def record(self, output: Slot, run: Backward) -> None:
        if self.recording:
            self._nodes.append((output, run))

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Run operations that save nothing: evaluation, or the forward pass of a checkpointed block."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def backward(self) -> None:
        """Run every node, last first. A node's gradient and what it saved go when it has run; a second
        contribution to one gradient makes a third tensor of the sum."""
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
        """The moments since the last call, as packed counts; they are forgotten."""
        marks = self.marks | {self.live}
        self.marks, self.rising = set(), False
        return marks


def widest(marks: set[int], *, without_gradients: bool = False) -> tuple[Live, ...]:
    """Those moments whose total no other's exceeds in every part."""
    totals: dict[int, int] = {}
    for mark in marks:
        live = mark & ~_GRADIENTS if without_gradients else mark
        total = (live & _KIND) + (live >> _WIDTH & _KIND) + (live >> 3 * _WIDTH)
        totals[total + (live >> 2 * _WIDTH & _KIND)] = live
    # Scores are the highest field, then tokens: in this order no total has more scores than one before it.
    ordered = sorted(totals, reverse=True)
    found, most = [], -1
    if (
        ordered[0] >> 2 * FIELD == 0
    ):  # no scores at all: what has fewer tokens must have more that is constant
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
    """Counts as records."""
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
