"""The operations of the torch decoder's block, on a tape that counts bytes.

Mirrors `memconsole_torch`: decoder.py operation by operation and variable by variable, lora.py, and autocast's cache
of 16-bit weights. `torch_block` combines the operations. Widths are elements per token: h hidden, q heads × head_size,
k kv_heads × head_size, f intermediate. c is the bytes of a compute element.
"""

from __future__ import annotations

import msgspec

from memconsole.memory.activations.torch_tape import (
    COPIES,
    GRADIENTS,
    WORKSPACE,
    Contribution,
    Size,
    Slot,
    Storage,
    Tape,
    Tensor,
)
from memconsole.memory.state.optimizer_state import update_bytes
from memconsole.memory.state.sizes import STORAGE_BLOCK
from memconsole.plan.architecture import Architecture

FP32 = 4
DECODED_CPU, DECODED_DEVICE = 2**17, 2**22
"""Elements decoded at a time: `memconsole_torch.techniques.quantized_base.CPU_SLICE` and `DEVICE_SLICE`."""


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """The settings, apart from sizes, that decide which operations a block runs."""

    compute: int
    """Bytes of an element in matmuls."""
    kind: str
    checkpointing: str
    rank: int = 0
    """Rank of the adapters; 0 without adapters."""
    frozen: bool = False
    """Whether only adapters are trained."""
    rounded: bool = False
    """Whether weights are stored in bf16 only, without an fp32 copy."""
    summed: bool = False
    """Whether gradients of bf16 weights are still accumulated in fp32."""
    storage: str = "bf16"
    """Storage type of a frozen base's matrices. If it is not bf16, each matrix is decoded for each matmul."""
    masked: bool = False
    """Whether attention gets an additive mask (rows are longer than the sliding window)."""
    padded: bool = False
    """Whether CUDA's kernel needs a copy of the whole batch's mask with padded rows. The padding itself is not
    counted."""
    stepping: str = ""
    """The optimizer, if each weight is updated as soon as its gradient is computed; else empty."""
    visiting: bool = False
    """Whether the optimizer's state is copied from host memory for each update."""
    compressed: bool = False
    """Whether the optimizer's moments are stored in bf16."""
    first: bool = False
    """Whether this is the first block of a frozen base: its input needs no gradient."""


def updating_bytes(k: Kernels, shape: tuple[int, ...], *, outside: bool = False) -> int:
    """Temporary bytes of updating a weight inside the backward pass. `outside`: the weight is not part of a block."""
    return update_bytes(
        k.kind,
        k.stepping,
        shape,
        visiting=k.visiting,
        compressed=k.compressed,
        rounded=k.rounded,
        outside=outside,
    )


def fp32(width: int) -> Size:
    """An fp32 tensor of `width` elements per token."""
    return Size(token=FP32 * width)


class Operations:
    """The operations of a decoder block on one tape."""

    def __init__(self, architecture: Architecture, kernels: Kernels) -> None:
        self.architecture, self.kernels = architecture, kernels
        self.tape = Tape()
        self.casts: list[Storage] = []
        """Autocast's cache: 16-bit copies of weights, freed when the forward context ends."""
        self.gradients: list[Storage] = []
        """Completed gradients of weights."""
        self.outputs: list[Storage] | None = None
        """The tensors that selective checkpointing keeps, in the order they are computed."""
        self.taking = False

    def norm(self, x: Tensor, groups: int = 1) -> Tensor:
        """A norm with fp32 statistics and its result in the compute precision."""
        a, c, tape, n = self.architecture, self.kernels.compute, self.tape, x.width
        of_heads = n != a.hidden_size or groups > 1
        centered = a.norm == "layernorm" and not of_heads
        fused = self.cuda and x.element == FP32 and (of_heads or not a.biases)
        whole = centered or fused
        wide = x.storage if x.element == FP32 else tape.new(fp32(n))
        if whole:
            statistic = tape.new(Size(token=(8 if centered else 4) * groups))
            y = tape.new(fp32(n))
        else:
            square = tape.new(fp32(n))
            statistic = tape.new(Size(token=4 * groups))
            del square
            scaled = tape.new(fp32(n))
            y = tape.new(fp32(n))
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
        inner_slot = Slot(fp32(n)) if whole and c != FP32 else slot

        def in_one_kernel(
            gradient: Storage, held: tuple[Storage, Storage] | None = held
        ) -> list[Contribution]:
            found = tape.new(fp32(n))
            self._stays(tape.new(Size(weight)), (weight // 4,))
            return [(below, found)] if below is not None else []

        def step_by_step(
            gradient: Storage, held: tuple[Storage, Storage] | None = held
        ) -> list[Contribution]:
            wide = tape.new(fp32(n)) if element != FP32 else None
            normed = tape.new(fp32(n))
            del wide
            widened = tape.new(fp32(n)) if c != FP32 else None
            tape.new(fp32(n))  # the product whose sum is the weight's gradient
            self._stays(tape.new(Size(weight)), (weight // 4,))
            inner = tape.new(fp32(n))
            tape.new(fp32(n))
            projected = tape.new(fp32(n))
            difference = tape.new(fp32(n))
            del projected
            found = tape.new(fp32(n))
            del difference
            narrow = tape.new(Size(token=element * n)) if element != FP32 else found
            del found, inner, normed, widened
            return [(below, narrow)] if below is not None else []

        tape.record(inner_slot, in_one_kernel if whole else step_by_step)
        if inner_slot is not slot:
            tape.record(slot, lambda gradient: [(inner_slot, tape.new(fp32(n)))])

    def project(self, x: Tensor, out: int) -> Tensor:
        """A linear layer, with its adapter if there is one."""
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
            copy = tape.new(Size(2 * (bias if self.kernels.rounded else elements)), COPIES)
            self.casts.append(copy)
        coded = frozen and self.kernels.storage != "bf16"
        decoded = self._decode(elements) if coded else None
        if frozen and below is None:
            return Tensor(self.output(c * out, again=self._again(width, out)), out, c, None)
        saved = tape.saved()
        held = (None if frozen else x.storage, copy if below is not None else None)
        held = held if saved else (None, None)
        weight = Slot(Size(c * elements))
        if not frozen:
            shape = (out, width)
            tape.record(weight, lambda gradient: self._weight_gradient(gradient, elements, shape))
        slot = Slot(Size(token=c * out))

        def run(
            gradient: Storage, held: tuple[Storage | None, Storage | None] = held
        ) -> list[Contribution]:
            found: list[Contribution] = []
            again = self._decode(elements) if coded else None
            if below is not None:
                found.append((below, tape.new(Size(token=c * width))))
            del again
            if not frozen:
                found.append((weight, tape.new(Size(c * elements))))
            return found

        tape.record(slot, run)
        del copy, held
        result = Tensor(self.output(c * out, again=self._again(width, out)), out, c, slot)
        del decoded
        return result

    def _decode(self, elements: int) -> Storage:
        """A matrix decoded from its codes, slice by slice. A slice needs its fp32 values and, for nf4, table rows."""
        kernels = self.kernels
        blocks = -(-elements // STORAGE_BLOCK)
        whole = self.tape.new(Size(kernels.compute * blocks * STORAGE_BLOCK), WORKSPACE)
        most = DECODED_CPU if kernels.kind == "cpu" else DECODED_DEVICE
        slice_elements = min(most, blocks * STORAGE_BLOCK)
        self.tape.new(Size(slice_elements * (6 if kernels.storage == "nf4" else 4)), WORKSPACE)
        return whole

    def _weight_gradient(
        self, gradient: Storage, elements: int, shape: tuple[int, ...]
    ) -> list[Contribution]:
        """Cast a weight's gradient to the type it is stored in, then store it or update the weight with it."""
        k = self.kernels
        if k.compute != FP32 and (k.summed or not k.rounded):
            gradient = self.tape.new(Size(FP32 * elements))
        self._stays(gradient, shape)
        return []

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding: two products for each half of each head. The backward pass reads only the tables."""
        c, tape, n, below = self.kernels.compute, self.tape, x.width, x.slot
        half = Size(token=2 * n)
        wide = tape.new(fp32(n)) if c != FP32 else x.storage
        halves = []
        for _ in range(2):
            left, right = tape.new(half), tape.new(half)
            halves.append(tape.new(half))
            del left, right
        turned = tape.new(fp32(n))
        halves.clear()
        result = tape.new(Size(token=c * n)) if c != FP32 else turned
        slot = Slot(Size(token=c * n)) if below is not None else None
        if slot is None or below is None:
            return Tensor(result, n, c, None)
        target: Slot = below

        def run(gradient: Storage) -> list[Contribution]:
            found = tape.new(fp32(n)) if c != FP32 else gradient
            products = [tape.new(half) for _ in range(4)]
            del found
            products.pop()
            products.pop()
            found = tape.new(fp32(n))
            products.clear()
            # The projection needs its gradient contiguous by tokens, in the compute type.
            found = tape.new(Size(token=c * n))
            return [(target, found)]

        tape.record(slot, run)
        del wide, turned
        return Tensor(result, n, c, slot)

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
        """Add a branch to the fp32 residual stream. The branch's gradient is cast to the branch's type."""
        tape, stream, branch = self.tape, x.slot, y.slot
        narrow = Size(token=y.element * y.width)
        slot = Slot(fp32(x.width))

        def run(gradient: Storage) -> list[Contribution]:
            found: list[Contribution] = [] if stream is None else [(stream, gradient)]
            if branch is not None:
                cast = y_element != FP32
                found.append((branch, tape.new(narrow) if cast else gradient))
            return found

        y_element = y.element
        tape.record(slot, run)
        return Tensor(tape.new(fp32(x.width)), x.width, FP32, slot)

    @property
    def cuda(self) -> bool:
        return self.kernels.kind in ("gpu", "rocm")

    def _stays(self, gradient: Storage, shape: tuple[int, ...]) -> None:
        """Handle a complete weight gradient: keep it for the optimizer step, or update the weight now."""
        k = self.kernels
        if k.stepping:
            self.tape.new(Size(updating_bytes(k, shape)))
            return
        gradient.becomes(GRADIENTS)
        self.gradients.append(gradient)

    def _again(self, width: int, out: int) -> bool:
        """Whether selective checkpointing recomputes this matmul (`memconsole_torch.techniques.checkpointing`)."""
        a = self.architecture
        if self.kernels.checkpointing == "attention":
            return True
        if self.kernels.rank and width == self.kernels.rank:
            return True
        return not a.post_norms and (width, out) == (a.intermediate_size, a.hidden_size)

    def output(self, per_token: int, *, again: bool = False) -> Storage:
        """The output of a matmul or of attention. With selective checkpointing, the first run keeps it and the second
        run reuses it, unless `again` says that it is recomputed."""
        if again or self.outputs is None or self.tape.stopped:
            return self.tape.new(Size(token=per_token))
        if self.taking:
            return self.outputs.pop(0)
        made = self.tape.new(Size(token=per_token))
        if not self.tape.recording:
            self.outputs.append(made)
        return made
