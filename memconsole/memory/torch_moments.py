"""A torch training step as a sequence of moments: what is live when, in bytes.

Follows `backends/memconsole_torch`: decoder.py for what each operation keeps, fused_loss.py for the logits,
engine.py for the order. In comments T tokens, V vocabulary, h hidden, f intermediate, c bytes of a
compute element. Checked against a dispatch-level trace of the engine in
tests/training/test_memory_against_trace.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory.activations import torch_block
from memconsole.memory.moments import Moment, Step

CHUNK_TOKENS = 1024
"""`memconsole_torch.fused_loss.CHUNK_TOKENS`."""


def moments(step: Step) -> Iterator[Moment]:
    """Every moment of a step, an evaluation and a checkpoint that can be the largest of its phase."""
    a, s, o, t, c = step.architecture, step.sizes, step.plan.optimize, step.tokens, step.compute
    block = torch_block(a, o.precision, o.gradient_checkpointing, step.kind, o.lora_rank)
    h = a.hidden_size
    stream = 4 * h * t  # the residual stream and its gradient are fp32
    hidden = c * h * t
    final_norm = stream + 8 * t
    score = t * step.sequence
    per_block = block.kept * t + block.kept_scores * score
    again = block.recomputed * t + block.recomputed_scores * score
    passing = block.passing * t + block.passing_scores * score
    # Keeping everything, little else is there; keeping matmul outputs, the last block's count twice.
    seen = {"none": passing - hidden, "selective": c * a.intermediate_size * t, "full": 0}
    forward = max(hidden, passing - seen[o.gradient_checkpointing])
    backward = block.backward * t + block.backward_scores * score
    tables = _tables(step)
    copies = _WeightCopies(step)
    kept = per_block * s.layers
    if o.activation_offload:  # two blocks on the device: one in use, one on its way
        kept = min(kept, 2 * per_block)
    model, resident, standing = step.weights + step.gathered, step.state.resident, step.standing
    head_gradient = 0 if step.frozen else 4 * step.head
    loss = _chunked_loss(step) if o.fused_loss else _whole_loss(step)
    # A tied head's gradient waits in autograd's buffer until the embedding's joins it.
    tied = s.head == 0
    early = standing + (head_gradient if tied or not standing else 0)
    last = max(step.gradients, standing)
    reduce = 4 * s.block.elements if step.shards > 1 else 0
    temporary = _gradient_temporary(step)

    def at(phase: str, weights: int, gradients: int, live: int, logits: int, work: int) -> Moment:
        return Moment(phase, weights, gradients, resident, live, logits, work, step.data)

    yield at("forward", model + copies.blocks, standing, kept + stream + tables, 0, forward)
    saved = kept + final_norm + tables
    by_chunks = head_gradient if o.fused_loss else 0
    weights = model + copies.blocks + copies.head
    yield at("loss", weights, standing + by_chunks, saved + hidden, loss.forward, 0)
    if not o.fused_loss:
        waiting = model + copies.kept + copies.head
        yield at("backward", waiting, standing, saved + hidden, loss.backward, 0)
        work = hidden + temporary.head
        yield at("backward", waiting, early, saved + hidden, loss.head, work)
    early = max(early, standing + by_chunks)
    norm = _norm_backward(step)
    yield at("backward", model + copies.kept, early, saved, 0, norm)
    # In a block the widest moment is behind the MLP's last matmul, whose weight has its gradient then.
    one = step.gradients // s.layers if step.frozen else -(-4 * s.block.elements // step.shards)
    down = 0 if step.frozen or standing else 4 * s.block.largest
    work = max(backward, backward // 2 + temporary.block) + stream + reduce
    in_use = max(copies.kept, copies.one)
    if a.post_norms:
        yield at("backward", model + in_use, early, kept + again + tables, 0, norm + stream)
    yield at("backward", model + in_use, early + down, kept + again + tables, 0, work)
    above = early if standing else early + (s.layers - 1) * one
    bottom = per_block + again + tables
    yield at("backward", model + copies.one, above + down, bottom, 0, work)
    behind = early if standing else early + s.layers * one
    yield at("backward", model, behind, stream + tables, 0, norm)
    yield at("backward", model, last + temporary.embedding, 0, 0, 0)

    yield Moment(
        "optimizer step",
        weights=step.weights,
        gradients=step.gradients,
        state=step.state.at_step,
        workspace=step.state.temporaries,
    )
    plain = max(passing, hidden + loss.evaluation)
    yield at("evaluation", model + copies.blocks + copies.head, 0, stream + tables, 0, plain)
    yield Moment("checkpoint", weights=step.weights, state=resident)


class _WeightCopies:
    """16-bit copies that autocast makes of fp32 weights: cached until the forward context ends, and kept
    longer by the matmuls whose backward pass reads them."""

    def __init__(self, step: Step) -> None:
        s, o = step.sizes, step.plan.optimize
        each = 0 if step.compute == 4 else 2
        # A frozen base is stored in 16 bits already; its adapters are not.
        matrices = o.lora_rank * s.block.adapter_width if step.frozen else s.block_matrices
        self.one = each * matrices
        self.blocks = self.one * s.layers
        self.head = 0 if step.frozen else each * step.head
        # Checkpointing drops them with everything else and casts a block's again when it recomputes.
        self.kept = self.blocks if o.gradient_checkpointing == "none" else 0
        self.kept_head = 0 if o.fused_loss else self.head


class _Loss:
    """Bytes of the logits and of what is computed from them."""

    def __init__(self, forward: int, backward: int, head: int, evaluation: int) -> None:
        self.forward, self.backward, self.head = forward, backward, head
        self.evaluation = evaluation


def _whole_loss(step: Step) -> _Loss:
    """fp32 logits and their log-softmax (8TV); backward, that, the gradient of the picked entries and of the
    logits (12TV); then the gradient in the compute precision."""
    n = step.tokens * step.architecture.vocab_size
    return _Loss(8 * n, 12 * n, step.compute * n, _evaluation_chunk(step))


def _chunked_loss(step: Step) -> _Loss:
    """A chunk's fp32 logits and logsumexp's own copy; the gradient by the hidden states from then on."""
    t, a, c = step.tokens, step.architecture, step.compute
    n = min(t, CHUNK_TOKENS) * a.vocab_size
    by_rows = c * a.hidden_size * t
    cast = 0 if c == 4 or step.frozen else 2 * step.head  # a chunk's share of the head's gradient
    chunk = max(8 * n, (4 if c == 4 else 6) * n + cast)
    return _Loss(chunk + by_rows, by_rows, by_rows, _evaluation_chunk(step))


def _evaluation_chunk(step: Step) -> int:
    return 8 * min(step.tokens, CHUNK_TOKENS) * step.architecture.vocab_size


class _Temporaries:
    """Weight gradients beside those that stay."""

    def __init__(self, head: int, block: int, embedding: int) -> None:
        self.head, self.block, self.embedding = head, block, embedding


def _gradient_temporary(step: Step) -> _Temporaries:
    """Before it is cast to fp32 or added to the sum of earlier micro-batches, a weight's gradient stands
    beside it. The embedding's is dense; a tied one's and the head's are added into a third."""
    if step.frozen:
        return _Temporaries(0, 0, 0)
    s = step.sizes
    largest = s.block.largest
    cast = 0 if step.compute == 4 else 2
    beside = 4 if step.accumulates else 0
    embedding = 8 * s.embedding if s.head == 0 else 0
    if step.accumulates:
        embedding = 12 * s.embedding if s.head == 0 else 4 * s.embedding
    fused = step.plan.optimize.fused_loss
    head = 0 if fused else (cast + (beside if s.head else 0)) * step.head
    return _Temporaries(head, max(cast + beside, 0) * largest, embedding)


def _norm_backward(step: Step) -> int:
    """A norm's backward pass works on several fp32 copies of the stream."""
    h, t, c = step.architecture.hidden_size, step.tokens, step.compute
    wide = 1 if step.architecture.norm == "layernorm" else 4
    return (wide + (c == 2)) * 4 * h * t + c * h * t


def _tables(step: Step) -> int:
    """Rotary cosines and sines of global and local layers, and the sliding window's additive mask."""
    a, length = step.architecture, step.sequence
    rotary = 8 * length * a.head_size if a.positions == "rope" else 0
    windowed = a.sliding_window is not None and a.sliding_window < length
    return rotary + (step.compute * length * length if windowed else 0)
