"""Attention of the torch decoder on the tape: the fused kernel of each kind of device, or matmuls and a softmax if no
kernel has a backward pass. Widths as in `torch_operations`."""

from __future__ import annotations

from memconsole.memory.activations.torch_operations import FP32, Operations, fp32
from memconsole.memory.activations.torch_tape import Contribution, Size, Slot, Storage, Tensor


class AttentionOperations(Operations):
    """A block's operations, including attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, c, tape = self.architecture, self.kernels.compute, self.tape
        grouped = a.heads > a.kv_heads
        flash = self.cuda and c != FP32 and not self.kernels.masked
        if grouped and self.kernels.kind != "cpu" and not flash:
            k, v = self.repeat(k), self.repeat(v)
        if self.kernels.kind == "apple":
            return self._compose(q, k, v)
        out = self.output(c * q.width)
        statistic = self.output(4 * a.heads)
        mask = tape.new(Size(score=c if self.kernels.padded else 0))
        held: tuple[Storage, ...] = (q.storage, k.storage, v.storage, out, statistic, mask)
        held = held if tape.saved() else ()
        slots = [(t.slot, Size(token=c * t.width)) for t in (q, k, v)]
        slot = Slot(Size(token=c * q.width))
        inside = self._inside_attention_backward(q.width, flash, grouped)

        def run(gradient: Storage, held: tuple[Storage, ...] = held) -> list[Contribution]:
            found = [(s, tape.new(size)) for s, size in slots if s is not None]
            tape.new(Size(token=inside))
            return found

        if any(s is not None for s, _ in slots):
            tape.record(slot, run)
        del held, mask
        return Tensor(out, q.width, c, slot)

    def _compose(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention from matmuls and a softmax, used if no fused kernel has a backward pass
        (`at::_scaled_dot_product_attention_math`). It runs in fp32; autocast narrows only the inputs of matmuls. The
        matmuls need each head contiguous, so tensors laid out by tokens are copied."""
        a, c, tape, width = self.architecture, self.kernels.compute, self.tape, q.width
        narrow, rope, shared = c != FP32, a.positions == "rope", a.heads > a.kv_heads
        wide, read = Size(score=FP32 * a.heads), Size(score=c * a.heads)
        widened = [tape.new(fp32(width)) for _ in range(3)] if narrow else []
        left, right = (tape.new(fp32(width)) for _ in range(2))
        scaled = (left, right)
        if narrow or not rope:
            left = tape.new(Size(token=c * width))
        if narrow or not (rope or shared):
            right = tape.new(Size(token=c * width))
        product = tape.new(read)
        masked = tape.new(wide)
        del product
        weights = tape.new(wide)
        del masked
        returned = tape.new(read) if narrow else None
        values = tape.new(Size(token=c * width)) if narrow or not shared else v.storage
        factors = tape.new(read) if narrow else weights
        out = tape.new(Size(token=c * width))
        saved = tape.saved()
        of_product = (left, right) if saved else ()
        of_softmax = (weights,) if saved else ()
        of_values = (factors, values) if saved else ()
        del widened, scaled, left, right, weights, factors, returned, values
        each = Size(token=c * width)
        slot, weighed, softened, masks, scores = map(Slot, (each, read, wide, wide, read))
        if not narrow:
            weighed, masks = softened, scores

        def through_product(
            gradient: Storage, held: tuple[Storage, ...] = of_product
        ) -> list[Contribution]:
            found = [tape.new(each) for _ in range(2)]
            found = [tape.new(fp32(width)) for _ in range(2)]
            return [
                (t.slot, tape.new(each) if narrow else scaled)
                for t, scaled in zip((q, k), found, strict=True)
                if t.slot is not None
            ]

        def through_softmax(
            gradient: Storage, held: tuple[Storage, ...] = of_softmax
        ) -> list[Contribution]:
            return [(masks, tape.new(wide))]

        def through_values(
            gradient: Storage, held: tuple[Storage, ...] = of_values
        ) -> list[Contribution]:
            found = [] if v.slot is None else [(v.slot, tape.new(each))]
            return [*found, (weighed, tape.new(read))]

        if any(t.slot is not None for t in (q, k, v)):
            tape.record(scores, through_product)
            if narrow:
                tape.record(masks, lambda gradient: [(scores, tape.new(read))])
            tape.record(softened, through_softmax)
            if narrow:
                tape.record(weighed, lambda gradient: [(softened, tape.new(wide))])
            tape.record(slot, through_values)
        del of_product, of_softmax, of_values
        return Tensor(out, width, c, slot)

    def _inside_attention_backward(self, width: int, flash: bool, grouped: bool) -> int:
        """Bytes per token that CUDA's kernels allocate inside their backward pass. Both: the queries' gradient summed in
        fp32, and row sums. Flash also: gradients of shared keys and values per query head, and a copy of its output
        laid out by tokens. Memory-efficient, in fp32, also: the product that it sums."""
        a, c = self.architecture, self.kernels.compute
        if not self.cuda:
            return 0
        heads = a.heads
        if not flash:
            return (8 if c == FP32 else 4) * width + 4 * heads
        summed = 4 * heads * -(-a.head_size // 32) * 32
        relaid = c * width if a.positions == "rope" else 0
        return summed + 4 * heads + relaid + (2 * c * width if grouped else 0)

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat keys or values for each query head."""
        c, tape, below = self.kernels.compute, self.tape, x.slot
        width = self.architecture.query_width
        slot = Slot(Size(token=c * width)) if below is not None else None
        if slot is not None and below is not None:
            summed, target = Size(token=c * x.width), below
            tape.record(slot, lambda gradient: [(target, tape.new(summed))])
        return Tensor(tape.new(Size(token=c * width)), width, c, slot)

    def relay(self, x: Tensor) -> Tensor:
        """Attention's result in the layout that the output projection reads. This is a copy if the kernel wrote its
        result in the layout of the rotated queries."""
        a = self.architecture
        copied = a.positions == "rope" and (
            self.kernels.kind == "cpu" or (self.kernels.compute != FP32 and not self.kernels.masked)
        )
        if not copied:
            return x
        return Tensor(self.tape.new(Size(token=x.element * x.width)), x.width, x.element, x.slot)
