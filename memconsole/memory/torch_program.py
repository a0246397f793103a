"""The torch decoder's block and final norm as programs of bytes: what each holds at its widest moments.

Mirrors `memconsole_torch`: decoder.py operation by operation and variable by variable, lora.py,
checkpointing.py and autocast's cache of 16-bit weights. Widths are elements per token: h hidden,
q heads × head_size, k kv_heads × head_size, f intermediate; c bytes of a compute element.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memconsole.memory.torch_tape import (
    COPIES,
    GRADIENTS,
    WORKSPACE,
    Contribution,
    Live,
    Size,
    Slot,
    Storage,
    Tape,
    Tensor,
)
from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import OptimizeChoice

FP32 = 4


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """What decides which operations a block runs, apart from its sizes."""

    compute: int
    """Bytes of an element in matmuls."""
    kind: str
    checkpointing: str
    rank: int = 0
    """Of adapters beside the matrices; 0: none."""
    frozen: bool = False
    """Whether only adapters are trained."""
    standing: bool = False
    """Whether gradients of earlier micro-batches are there to be added to."""
    masked: bool = False
    """Whether attention gets an additive mask (a sliding window that cuts)."""
    first: bool = False
    """The first block of a frozen base: nothing below it wants a gradient."""


class Program(msgspec.Struct, frozen=True):
    """Live bytes around one block, its input counted from its forward to its backward pass."""

    forward: tuple[Live, ...]
    """Widest moments of the forward pass; the output is there in the last."""
    evaluation: tuple[Live, ...]
    """The same where no gradient will be asked for."""
    kept: Live
    """Between the forward and the backward pass."""
    cast: Size
    """Weight copies besides, until the forward context ends."""
    backward: tuple[Live, ...]
    """Widest moments of the backward pass, what was kept and the gradient of the output counted in."""
    gradients: int
    """Bytes of gradients that stay."""


@lru_cache(maxsize=1024)
def block_program(a: Architecture, kernels: Kernels) -> Program:
    """One decoder block."""
    return _run(_Operations(a, kernels), _Operations.block, evaluated=_Operations(a, kernels))


@lru_cache(maxsize=1024)
def final_norm_program(a: Architecture, kernels: Kernels) -> Program:
    """The norm before the head; never checkpointed."""
    kernels = msgspec.structs.replace(kernels, checkpointing="none", first=False)
    return _run(_Operations(a, kernels), _Operations.norm, evaluated=_Operations(a, kernels))


def kept_per_token(a: Architecture, choice: OptimizeChoice, checkpointing: str, kind: str) -> Size:
    """Activations that one block keeps under `checkpointing`."""
    kernels = Kernels(
        compute=4 if choice.precision == "fp32" else 2,
        kind=kind,
        checkpointing=checkpointing,
        rank=choice.lora_rank,
        frozen=choice.freeze_base or choice.lora_rank > 0,
    )
    return block_program(a, kernels).kept.activations


def _run(o: _Operations, body: object, evaluated: _Operations) -> Program:
    a, tape, mode = o.architecture, o.tape, o.kernels.checkpointing
    apply = body.__get__(o)  # type: ignore[attr-defined]
    h = a.hidden_size
    x = Tensor(tape.new(_wide(h)), h, FP32, None if o.kernels.first else Slot(_wide(h)))
    if mode == "none":
        y = apply(x)
    else:
        o.outputs = [] if mode == "selective" else None
        with tape.discarding():
            y = apply(x)
    forward = tape.take_peaks()
    slot, width = y.slot, y.element * y.width
    below, argument = x.slot, x if mode != "none" else None
    del x, y
    with_casts = tape.now()
    o.casts.clear()
    kept = tape.now()
    tape.take_peaks()
    gradient = tape.new(Size(token=width), WORKSPACE)
    if argument is not None:
        slot = _recompute(o, apply, argument)
    tape.kind = WORKSPACE
    if slot is not None:
        slot.gradient = gradient
    del gradient
    tape.backward()
    if o.outputs is not None:
        o.outputs.clear()
    del argument, below
    backward, end = tape.take_peaks(), tape.now()
    e = evaluated
    with e.tape.discarding():
        x = Tensor(e.tape.new(_wide(h)), h, FP32, None)
        body.__get__(e)(x)  # type: ignore[attr-defined]
    return Program(
        forward=forward,
        evaluation=e.tape.take_peaks(),
        kept=kept,
        cast=with_casts.copies.plus(kept.copies, -1),
        backward=backward,
        gradients=end.gradients.constant,
    )


def _recompute(o: _Operations, apply: object, x: Tensor) -> Slot | None:
    """Run a checkpointed block's forward pass again, up to the last tensor that was to be saved."""
    tape, h, c = o.tape, o.architecture.hidden_size, o.kernels.compute
    # The output's gradient, cast for the branch below the residual sum, is there already.
    waiting = tape.new(Size(token=c * h), WORKSPACE) if c != FP32 else None
    tape.most_saves, tape.saves, o.taking = tape.saves, 0, True
    y = apply(x)  # type: ignore[operator]
    tape.most_saves, o.taking = None, False
    o.casts.clear()
    del waiting
    return y.slot  # type: ignore[no-any-return]


def _wide(width: int) -> Size:
    return Size(token=FP32 * width)


class _Operations:
    """The operations of a decoder block on one tape."""

    def __init__(self, architecture: Architecture, kernels: Kernels) -> None:
        self.architecture, self.kernels = architecture, kernels
        self.tape = Tape()
        self.casts: list[Storage] = []
        """Autocast's cache: 16-bit copies of weights until the forward context ends."""
        self.gradients: list[Storage] = []
        """Gradients of weights, once they are made."""
        self.outputs: list[Storage] | None = None
        """What selective checkpointing keeps, in the order in which it is made."""
        self.taking = False

    def block(self, x: Tensor) -> Tensor:
        a = self.architecture
        attended = self.attention(self.norm(x))
        x = self.add(x, self.norm(attended) if a.post_norms else attended)
        return self.add(
            x, self.norm(self.mlp(self.norm(x))) if a.post_norms else self.mlp(self.norm(x))
        )

    def attention(self, x: Tensor) -> Tensor:
        a = self.architecture
        q, k = self.project(x, a.query_width), None
        if a.query_key_norm:
            q = self.norm(q, a.heads)
        k = self.project(x, a.key_width)
        if a.query_key_norm:
            k = self.norm(k, a.kv_heads)
        v = self.project(x, a.key_width)
        if a.positions == "rope":
            q, k = self.rotate(q), self.rotate(k)
        attended = self.attend(q, k, v)
        return self.project(self.relay(attended), a.hidden_size)

    def mlp(self, x: Tensor) -> Tensor:
        a = self.architecture
        if a.gated_mlp:
            return self.project(
                self.multiply(
                    self.activation(self.project(x, a.intermediate_size)),
                    self.project(x, a.intermediate_size),
                ),
                a.hidden_size,
            )
        return self.project(self.activation(self.project(x, a.intermediate_size)), a.hidden_size)

    def norm(self, x: Tensor, groups: int = 1) -> Tensor:
        """fp32 statistics; the result in the compute precision."""
        a, c, tape, n = self.architecture, self.kernels.compute, self.tape, x.width
        of_heads = n != a.hidden_size or groups > 1
        centered = a.norm == "layernorm" and not of_heads
        fused = self._cuda and x.element == FP32 and (of_heads or not a.biases)
        whole = centered or fused
        wide = x.storage if x.element == FP32 else tape.new(_wide(n))
        if whole:
            statistic = tape.new(Size(token=(8 if centered else 4) * groups))
            y = tape.new(_wide(n))
        else:
            square = tape.new(_wide(n))
            statistic = tape.new(Size(token=4 * groups))
            del square
            scaled = tape.new(_wide(n))
            y = tape.new(_wide(n))
            del scaled
        if c != FP32:
            y = tape.new(Size(token=c * n))
        trained = not self.kernels.frozen
        weight = 4 * (n // groups) * (2 if a.biases and not of_heads else 1) if trained else 0
        wanted = x.slot is not None or trained
        held = (x.storage, statistic) if wanted and tape.saved() else None
        del wide
        slot = Slot(Size(token=c * n)) if wanted else None
        if slot is not None:
            self._norm_backward(x.slot, slot, held, (n, x.element, whole, weight))
        return Tensor(y, n, c, slot)

    def _norm_backward(
        self,
        below: Slot | None,
        slot: Slot,
        held: tuple[Storage, Storage] | None,
        sizes: tuple[int, int, bool, int],
    ) -> None:
        n, element, whole, weight = sizes
        c, tape = self.kernels.compute, self.tape
        inner_slot = Slot(_wide(n)) if whole and c != FP32 else slot

        def in_one_kernel(
            gradient: Storage, held: tuple[Storage, Storage] | None = held
        ) -> list[Contribution]:
            found = tape.new(_wide(n))
            self._stays(weight)
            return [(below, found)] if below is not None else []

        def step_by_step(
            gradient: Storage, held: tuple[Storage, Storage] | None = held
        ) -> list[Contribution]:
            wide = tape.new(_wide(n)) if element != FP32 else None
            normed = tape.new(_wide(n))
            del wide
            widened = tape.new(_wide(n)) if c != FP32 else None
            tape.new(_wide(n))  # the product that is summed to the weight's gradient
            self._stays(weight)
            inner = tape.new(_wide(n))
            tape.new(_wide(n))
            projected = tape.new(_wide(n))
            difference = tape.new(_wide(n))
            del projected
            found = tape.new(_wide(n))
            del difference
            narrow = tape.new(Size(token=element * n)) if element != FP32 else found
            del found, inner, normed, widened
            return [(below, narrow)] if below is not None else []

        tape.record(inner_slot, in_one_kernel if whole else step_by_step)
        if inner_slot is not slot:
            tape.record(slot, lambda gradient: [(inner_slot, tape.new(_wide(n)))])

    def project(self, x: Tensor, out: int) -> Tensor:
        """A linear layer, with its adapter where there is one."""
        if not self.kernels.rank:
            return self.linear(x, out, frozen=self.kernels.frozen)
        low = self.scale(self.linear(x, self.kernels.rank))
        return self.sum(self.linear(x, out, frozen=True), self.linear(low, out))

    def linear(self, x: Tensor, out: int, *, frozen: bool = False) -> Tensor:
        c, tape, width, below = self.kernels.compute, self.tape, x.width, x.slot
        bias = out if self.architecture.biases and not self.kernels.frozen else 0
        elements = out * width + bias
        copy = None
        if c != FP32 and not frozen:
            copy = tape.new(Size(2 * elements), COPIES)
            self.casts.append(copy)
        if frozen and below is None:
            return Tensor(self._output(c * out), out, c, None)
        saved = tape.saved()
        held = (None if frozen else x.storage, copy if below is not None else None)
        held = held if saved else (None, None)
        weight = Slot(Size(c * elements))
        if not frozen:
            tape.record(weight, lambda gradient: self._weight_gradient(gradient, elements))
        slot = Slot(Size(token=c * out))
        made = GRADIENTS if c == FP32 and not self.kernels.standing else WORKSPACE

        def run(
            gradient: Storage, held: tuple[Storage | None, Storage | None] = held
        ) -> list[Contribution]:
            found: list[Contribution] = []
            if below is not None:
                found.append((below, tape.new(Size(token=c * width))))
            if not frozen:
                found.append((weight, tape.new(Size(c * elements), made)))
            return found

        tape.record(slot, run)
        del copy, held
        return Tensor(self._output(c * out), out, c, slot)

    def _weight_gradient(self, gradient: Storage, elements: int) -> list[Contribution]:
        """Cast to fp32, then kept, or added to what earlier micro-batches left."""
        if self.kernels.compute != FP32:
            kind = WORKSPACE if self.kernels.standing else GRADIENTS
            gradient = self.tape.new(Size(FP32 * elements), kind)
        if not self.kernels.standing:
            self.gradients.append(gradient)
        return []

    def rotate(self, x: Tensor) -> Tensor:
        """Two products for each half of each head; the tables are what the backward pass reads."""
        c, tape, n, below = self.kernels.compute, self.tape, x.width, x.slot
        half = Size(token=2 * n)
        wide = tape.new(_wide(n)) if c != FP32 else x.storage
        halves = []
        for _ in range(2):
            left, right = tape.new(half), tape.new(half)
            halves.append(tape.new(half))
            del left, right
        turned = tape.new(_wide(n))
        halves.clear()
        result = tape.new(Size(token=c * n)) if c != FP32 else turned
        slot = Slot(Size(token=c * n)) if below is not None else None
        if slot is None or below is None:
            return Tensor(result, n, c, None)
        target: Slot = below

        def run(gradient: Storage) -> list[Contribution]:
            found = tape.new(_wide(n)) if c != FP32 else gradient
            products = [tape.new(half) for _ in range(4)]
            del found
            products.pop()
            products.pop()
            found = tape.new(_wide(n))
            products.clear()
            # The projection reads a gradient laid out by tokens: that of the narrow type, if there is one.
            found = tape.new(Size(token=c * n))
            return [(target, found)]

        tape.record(slot, run)
        del wide, turned
        return Tensor(result, n, c, slot)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, c, tape = self.architecture, self.kernels.compute, self.tape
        grouped = a.heads > a.kv_heads
        flash = self._cuda and c != FP32 and not self.kernels.masked
        if grouped and self.kernels.kind != "cpu" and not flash:
            k, v = self.repeat(k), self.repeat(v)
        scores = Size(score=c * a.heads if self.kernels.kind == "apple" else 0)
        out = self._output(c * q.width)
        statistic = self._output(4 * a.heads)
        weights = tape.new(scores)
        held: tuple[Storage, ...] = (q.storage, k.storage, v.storage, out, statistic, weights)
        held = held if tape.saved() else ()
        slots = [(t.slot, Size(token=c * t.width)) for t in (q, k, v)]
        slot = Slot(Size(token=c * q.width))
        inside = self._inside_attention_backward(q.width, flash, grouped)

        def run(gradient: Storage, held: tuple[Storage, ...] = held) -> list[Contribution]:
            found = [(s, tape.new(size)) for s, size in slots if s is not None]
            tape.new(Size(token=inside))
            tape.new(scores)
            return found

        if any(s is not None for s, _ in slots):
            tape.record(slot, run)
        del held, weights
        return Tensor(out, q.width, c, slot)

    def _inside_attention_backward(self, width: int, flash: bool, grouped: bool) -> int:
        """Bytes per token that CUDA's kernels allocate: the queries' gradient summed in fp32 and its row
        sums; flash besides gradients of shared keys and values per query head, and a copy of its output
        by tokens; the memory-efficient kernel, in fp32, the product that it sums."""
        a, c = self.architecture, self.kernels.compute
        if not self._cuda:
            return 0
        heads = a.heads
        if not flash:
            return (8 if c == FP32 else 4) * width + 4 * heads
        summed = 4 * heads * -(-a.head_size // 32) * 32
        relaid = c * width if a.positions == "rope" else 0
        return summed + 4 * heads + relaid + (2 * c * width if grouped else 0)

    def repeat(self, x: Tensor) -> Tensor:
        """Keys or values once per query head."""
        c, tape, below = self.kernels.compute, self.tape, x.slot
        width = self.architecture.query_width
        slot = Slot(Size(token=c * width)) if below is not None else None
        if slot is not None and below is not None:
            summed, target = Size(token=c * x.width), below
            tape.record(slot, lambda gradient: [(target, tape.new(summed))])
        return Tensor(tape.new(Size(token=c * width)), width, c, slot)

    def relay(self, x: Tensor) -> Tensor:
        """Attention's result as the output projection reads it: a copy where the kernel laid it out as it
        found rotated queries."""
        a = self.architecture
        copied = a.positions == "rope" and (
            self.kernels.kind == "cpu" or self.kernels.compute != FP32
        )
        if not copied:
            return x
        return Tensor(self.tape.new(Size(token=x.element * x.width)), x.width, x.element, x.slot)

    def activation(self, x: Tensor) -> Tensor:
        return self._elementwise(x, saves=True)

    def scale(self, x: Tensor) -> Tensor:
        return self._elementwise(x, saves=False)

    def _elementwise(self, x: Tensor, *, saves: bool) -> Tensor:
        tape, size, below = self.tape, Size(token=x.element * x.width), x.slot
        held = x.storage if saves and tape.saved() else None
        slot = Slot(size)
        if below is not None:
            target: Slot = below

            def run(gradient: Storage, held: Storage | None = held) -> list[Contribution]:
                return [(target, tape.new(size))]

            tape.record(slot, run)
        del held
        return Tensor(tape.new(size), x.width, x.element, slot)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        tape, size, slots = self.tape, Size(token=x.element * x.width), (x.slot, y.slot)
        held = (x.storage, y.storage) if tape.saved() else None
        slot = Slot(size)

        def run(
            gradient: Storage, held: tuple[Storage, Storage] | None = held
        ) -> list[Contribution]:
            return [(s, tape.new(size)) for s in slots if s is not None]

        tape.record(slot, run)
        del held
        return Tensor(tape.new(size), x.width, x.element, slot)

    def sum(self, x: Tensor, y: Tensor) -> Tensor:
        slots, size = (x.slot, y.slot), Size(token=x.element * x.width)
        slot = Slot(size)
        self.tape.record(slot, lambda gradient: [(s, gradient) for s in slots if s is not None])
        return Tensor(self.tape.new(size), x.width, x.element, slot)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """The fp32 residual stream and a branch; the branch's gradient is cast to its own type."""
        tape, stream, branch = self.tape, x.slot, y.slot
        narrow = Size(token=y.element * y.width)
        slot = Slot(_wide(x.width))

        def run(gradient: Storage) -> list[Contribution]:
            found: list[Contribution] = [] if stream is None else [(stream, gradient)]
            if branch is not None:
                cast = y_element != FP32
                found.append((branch, tape.new(narrow) if cast else gradient))
            return found

        y_element = y.element
        tape.record(slot, run)
        return Tensor(tape.new(_wide(x.width)), x.width, FP32, slot)

    @property
    def _cuda(self) -> bool:
        return self.kernels.kind in ("gpu", "rocm")

    def _stays(self, size: int) -> None:
        """A small gradient, kept unless there is one to add it to."""
        if size and not self.kernels.standing:
            self.gradients.append(self.tape.new(Size(size), GRADIENTS))

    def _output(self, per_token: int) -> Storage:
        """What a matmul or attention makes: kept, or taken from what was kept, by selective checkpointing."""
        if self.outputs is None or self.tape.stopped:
            return self.tape.new(Size(token=per_token))
        if self.taking:
            return self.outputs.pop(0)
        made = self.tape.new(Size(token=per_token))
        if not self.tape.recording:
            self.outputs.append(made)
        return made
