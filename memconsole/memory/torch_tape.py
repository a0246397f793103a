"""An autograd that counts bytes instead of computing: what is live at each operation of a torch program.

A program written against it, in the order and with the local names of the real one, holds each storage
exactly as long as torch does: a `Storage` counts until its last reference goes, references being those
of the program's own variables, of the nodes that saved it for the backward pass, and of gradients that
wait for their node. Sizes have a constant part, a part per token and a part per token and key, so that one
run of a program answers for every batch and length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

ACTIVATIONS, WORKSPACE, GRADIENTS, COPIES = range(4)
"""What a storage counts as: made in the forward pass (or again, under checkpointing), made in the backward
pass, gradients of weights, 16-bit copies of weights."""


class Size(NamedTuple):
    """Bytes: `constant + token * tokens + score * tokens * keys`."""

    constant: int = 0
    token: int = 0
    score: int = 0

    def bytes(self, tokens: int, scores: int) -> int:
        return self.constant + self.token * tokens + self.score * scores

    def plus(self, other: Size, times: int = 1) -> Size:
        """This size and `times` another."""
        return Size(*(a + times * b for a, b in zip(self, other, strict=True)))


class Live(NamedTuple):
    """What is live at one moment, by what it counts as."""

    activations: Size
    workspace: Size
    gradients: Size
    copies: Size

    def plus(self, other: Live, times: int = 1) -> Live:
        return Live(*(a.plus(b, times) for a, b in zip(self, other, strict=True)))


class Storage:
    """Bytes of one tensor, counted by `tape` until nothing refers to it."""

    __slots__ = ("_index", "_size", "_tape")

    def __init__(self, tape: Tape, kind: int, size: Size) -> None:
        self._tape, self._index, self._size = tape, 3 * kind, size
        tape.add(self._index, size, 1)
        tape.mark()

    def __del__(self) -> None:
        self._tape.add(self._index, self._size, -1)


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


class Node(msgspec.Struct):
    """One operation's backward pass. `run` is also what holds the storages it saved."""

    output: Slot
    run: Backward


class Tape:
    """Counts live bytes and keeps the moments that can be a peak."""

    def __init__(self) -> None:
        self._live = [0] * 12
        self._marks: set[tuple[int, ...]] = set()
        self.kind = ACTIVATIONS
        self.recording = True
        """Whether operations save for the backward pass."""
        self.saves = 0
        """Operations that saved, or would have."""
        self.most_saves: int | None = None
        """Recomputing ends at this many: what comes after it makes nothing."""
        self._nodes: list[Node] = []

    def add(self, index: int, size: Size, sign: int) -> None:
        live = self._live
        live[index] += sign * size[0]
        live[index + 1] += sign * size[1]
        live[index + 2] += sign * size[2]

    def mark(self) -> None:
        """Remember this moment."""
        self._marks.add(tuple(self._live))

    @property
    def stopped(self) -> bool:
        return self.most_saves is not None and self.saves >= self.most_saves

    def new(self, size: Size, kind: int | None = None) -> Storage:
        """A storage of `size`, of the kind at hand unless another is named."""
        if self.stopped:
            size = Size()
        return Storage(self, self.kind if kind is None else kind, size)

    def saved(self) -> bool:
        """Count an operation that saves; True where what it saves is really held."""
        self.saves += 1
        return self.recording

    def record(self, output: Slot, run: Backward) -> None:
        if self.recording:
            self._nodes.append(Node(output, run))

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
            node = self._nodes.pop()
            gradient, node.output.gradient = node.output.gradient, None
            if gradient is None:
                continue
            found = node.run(gradient)
            del gradient, node
            while found:
                self._gather(*found.pop(0))

    def _gather(self, slot: Slot, part: Storage) -> None:
        slot.gradient = part if slot.gradient is None else self.new(slot.size)

    def now(self) -> Live:
        return _live(self._live)

    def take_peaks(self) -> tuple[Live, ...]:
        """The moments since the last call that no other exceeds in every part, and forget them."""
        marks, self._marks = self._marks, set()
        return tuple(_live(mark) for mark in _undominated(marks))


def _live(counts: Iterable[int]) -> Live:
    c = list(counts)
    return Live(*(Size(*c[i : i + 3]) for i in (0, 3, 6, 9)))


def _undominated(marks: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those marks whose total is not matched or exceeded in every part by another's."""
    totals = {tuple(sum(mark[i::3]) for i in range(3)): mark for mark in marks}
    front: list[tuple[int, ...]] = []
    for total in sorted(totals, reverse=True):
        if not any(all(a <= b for a, b in zip(total, other, strict=True)) for other in front):
            front.append(total)
    return [totals[total] for total in front]
