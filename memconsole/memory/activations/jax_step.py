"""A JAX training step as a sequence of moments, with the bytes that are live at each.

Follows `backends/memconsole_jax`. Sizes of the arguments (weights, state, batch) are exact; outputs reuse donated
arguments. XLA decides which temporaries are alive together: the number of copies of each was measured
(coefficients.json, `xla`). Symbols in comments: T tokens, V vocabulary, h hidden, f intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory.activations.dropping import BITS, MASK, dropping_bytes
from memconsole.memory.activations.jax_block import BlockBytes, jax_block
from memconsole.memory.activations.jax_chunks import (
    loss_chunk_tokens,
    masked_score_bytes,
    score_bytes,
)
from memconsole.memory.activations.jax_experts import filled_up, gate_and_up, looping
from memconsole.memory.activations.jax_gathered import Gathered, is_padded
from memconsole.memory.activations.tiles import tile_of
from memconsole.memory.coefficients import Overlap, xla
from memconsole.memory.state.step_sizes import Moment, StepSizes

EVALUATED_SCORES = 1.1
"""How many chunks of attention scores are live beside the tensors of an MLP in an evaluation on a CPU. (From XLA's plans
of the evaluations of seven models of 1 to 30 M parameters, on rows of 64 to 1,024 tokens.) A backward pass needs more."""
LOOP_ARRAYS = 3
"""What the loop over the tiles of an MLP holds of all tokens in its backward pass, in arrays as wide as the stream. (From XLA's
plans of 16 steps on a CPU.)"""
MERGED_BYTES = 32 * 2**20
"""XLA for GPUs joins two products of the same tensor if the operands and the result of one of them are not larger
(`xla_gpu_dot_merger_threshold_mb`)."""


def moments(step: StepSizes) -> Iterator[Moment]:
    """Every moment of a step, an evaluation and a checkpoint that can be the peak of its phase."""
    timeline = _Timeline(step)
    yield timeline.forward()
    yield timeline.loss()
    yield from timeline.backward()
    yield Moment(
        "optimizer step",
        weights=step.weights,
        gradients=step.gradients,
        state=step.state.at_step,
        workspace=step.state.temporaries,
        data=step.data,
    )
    yield timeline.evaluation()
    yield Moment(  # one array at a time is copied to be written
        "checkpoint",
        weights=step.weights,
        state=step.state.resident,
        workspace=_largest_array(step),
    )


class _Timeline:
    """The moments of one plan's programs for training and evaluation."""

    def __init__(self, step: StepSizes) -> None:
        a, t = step.architecture, step.tokens
        self.step = step
        learned = a.positions == "learned"
        self.overlap = xla(step.kind, step.plan.device.name, learned_positions=learned)
        self.tile = tile_of(step, t)
        self.block = self._block(tiled=self.tile > 0)
        self.gathered = Gathered.of(step, self.block.element)
        self.stream = 4 * a.hidden_size * t
        """The fp32 residual stream of a micro-batch."""
        self.kept = self._kept()
        """What blocks keep from the forward to the backward pass."""
        drops = step.plan.train.attention_dropout > 0
        one_chunk = score_bytes(step, step.plan.train.batch_size, dropping=drops)
        self.has_scores = one_chunk > 0
        self.scores = self.overlap.scores * one_chunk
        self.masked_scores = masked_score_bytes(step, one_chunk)
        self.copies = _rounded_blocks(step, self.overlap)
        """A 16-bit copy of all blocks' matrices."""
        self.dropout = dropping_bytes(step) * t
        if drops:
            self.dropout += one_chunk // 4 * (MASK + BITS)
        self.table_gradient = step.gradient * step.sizes.embedding if step.flow.table else 0
        """The gradient of the embedding's table, at the end of the backward pass."""
        self.logits, head = _loss(step, self.overlap)
        self._set_gradients(head)

    def _block(self, *, tiled: bool) -> BlockBytes:
        a, o, kind = self.step.architecture, self.step.plan.optimize, self.step.kind
        adapters = o.lora_rank, o.lora_targets
        return jax_block(a, o.precision, o.gradient_checkpointing, kind, *adapters, tiled=tiled)

    def _kept(self) -> int:
        step, mode = self.step, self.step.plan.optimize.gradient_checkpointing
        one_block = self.block.kept * step.tokens
        one_block += _own_rotations(step) if mode == "none" else 0
        one_block += filled_up(step, self.block.element) if mode in ("none", "selective") else 0
        blocks = step.sizes.layers
        if step.plan.optimize.activation_offload:
            # Except on a CPU, the next block's activations are already being copied.
            blocks = min(blocks, 1 if step.kind == "cpu" else 2)
        return one_block * blocks + _rotations(step, step.tokens)

    def _set_gradients(self, head: int) -> None:
        """Set the bytes of gradients that are live beside those of earlier micro-batches. `head`: the head's gradient
        in the backward pass of the blocks."""
        step, s = self.step, self.step.sizes
        whole_head = step.gradient * step.head if step.flow.head else 0
        outside = whole_head + (self.table_gradient if s.head else 0)
        blocks = max(0, step.gradients - outside // step.shards)
        if step.accumulates and not step.frozen_blocks:
            # The backward pass adds each gradient to the accumulated sum.
            blocks //= s.layers
            # Several devices first add up their gradients of the head. Except on a CPU, the total is another tensor.
            copies = 0 if step.plan.device.count == 1 else 1 if step.kind == "cpu" else 2
            whole_head, head = copies * whole_head, copies * head
        self.block_gradients = blocks
        """Those of the blocks that the backward pass makes."""
        self.chunked_head_gradient = whole_head
        """That of the head while the loss is computed in chunks."""
        self.head_gradient = head
        """That of the head in the backward pass of the blocks."""

    def _at(
        self, phase: str, gradients: int, live: int, loss: int, work: float, whole: int
    ) -> Moment:
        """A moment with `live` bytes of activations, `loss` of logits and `work` of temporaries. `whole`: bytes of
        weights that this device has gathered."""
        step = self.step
        work += self.copies + (0 if phase == "evaluation" else self.masked_scores)
        weights, state = step.weights + whole, step.state.resident
        return Moment(phase, weights, gradients, state, live, loss, int(work), step.data)

    def forward(self) -> Moment:
        step, a, c = self.step, self.step.architecture, self.block.element
        # Of attention: the stream, its norm, queries, keys, values and the output.
        widths = (4 + c) * a.hidden_size + 2 * c * (a.query_width + a.key_width)
        attention = widths * step.tokens + self.scores
        block = self.block.passing * step.tokens + looping(step, c, training=False)
        block += self.block.tile_passing * self.tile
        work = max(block, attention) + self.dropout
        return self._at(
            "forward", step.standing, self.kept + self.stream, 0, work, self.gathered.forward
        )

    def loss(self) -> Moment:
        step, overlap = self.step, self.overlap
        chunked = step.plan.optimize.fused_loss
        allocated = overlap.early_blocks_chunked if chunked else overlap.early_blocks
        early = int(allocated * self.block_gradients)
        early += self.chunked_head_gradient if chunked else 0
        work = overlap.loss_stream * self.stream
        return self._at(
            "loss", step.standing + early, self.kept, self.logits, work, self.gathered.head
        )

    def backward(self) -> Iterator[Moment]:
        """The backward pass of a block's MLP, that of its attention, and that of the embedding."""
        whole = self.gathered.backward
        gradients = self.step.standing + self.block_gradients + self.head_gradient
        yield self._at("backward", gradients, self.kept, 0, self._through_mlp(), whole)
        yield self._at("backward", gradients, self.kept, 0, self._through_attention(), whole)
        yield self._at("backward", gradients + self.table_gradient, 0, 0, self.stream, whole)

    @property
    def _recomputed(self) -> float:
        """How many copies of what a checkpointed block recomputes are live in its backward pass."""
        return self.overlap.again if self.block.element == 4 else 1.0

    @property
    def _taken_out(self) -> float:
        """How many copies of what a block keeps are live beside the kept activations of all blocks. Without checkpointing,
        the block that is being computed exists twice: among those of all blocks and as a copy."""
        mode = self.step.plan.optimize.gradient_checkpointing
        return self.overlap.slice if mode == "none" else 0.0

    @property
    def _block_matrices(self) -> float:
        """Bytes of one block's matrices, taken out of those of all blocks."""
        s = self.step.sizes
        return self.overlap.layer * self.block.element * (s.block_matrices - s.block_experts)

    def _through_mlp(self) -> float:
        """Temporaries in the backward pass of a block's MLP."""
        step, block, overlap = self.step, self.block, self.overlap
        a, o, c, t = step.architecture, step.plan.optimize, block.element, step.tokens
        if a.experts:
            width = self._recomputed * block.attention_again + _mlp_of_experts(step, block)
        else:
            inner = (overlap.mlp_16 if step.compute == 2 else overlap.mlp) * c * a.intermediate_size
            again = self._recomputed * (block.attention_again + block.mlp_again)
            width = again + self._taken_out * block.mlp + (0 if self.tile else inner)
        width += block.adapters_again
        if c * t * (a.hidden_size + o.lora_rank) <= MERGED_BYTES:
            width += block.merged_again
        streams = overlap.mlp_stream * self.stream
        total = self.dropout + width * t + streams + self._block_matrices
        if self.tile:
            total += (block.tile + inner) * self.tile + self._summed_over_tiles
            total += LOOP_ARRAYS * c * a.hidden_size * t
        return total + looping(step, c, training=True)

    @property
    def _summed_over_tiles(self) -> float:
        """Bytes of the fp32 gradients of one block's MLP while tiles add to them."""
        a = self.step.architecture
        if self.step.frozen_blocks:
            return 0.0
        return 4.0 * (3 if a.gated_mlp else 2) * a.hidden_size * a.intermediate_size

    def _through_attention(self) -> float:
        """Temporaries in the backward pass of a block's attention."""
        block, overlap, c = self.block, self.overlap, self.block.element
        a, t = self.step.architecture, self.step.tokens
        width = self._recomputed * block.attention_again + self._taken_out * block.attention
        width += overlap.heads * c * a.query_width
        if self.has_scores:  # gradients of keys and values are summed in fp32
            width += 2 * (4 - c) * a.key_width
        streams = overlap.heads_stream * self.stream
        return self.dropout + width * t + self.scores + streams + self._block_matrices

    def evaluation(self) -> Moment:
        step, c = self.step, self.block.element
        a, t = step.architecture, step.evaluation_tokens
        copies = EVALUATED_SCORES if step.kind == "cpu" else self.overlap.scores
        scores = copies * score_bytes(step, step.plan.evaluation_batch)
        tile = tile_of(step, t)
        evaluated = self._block(tiled=tile > 0)
        passing = evaluated.passing * t + evaluated.tile_passing * tile
        block = passing + looping(step, c, training=False) + scores
        logits = self.overlap.chunk_16 if c == 2 else self.overlap.chunk
        chunk = int(logits * 4 * a.vocab_size * loss_chunk_tokens(step, t))
        stream = 4 * a.hidden_size * t + _rotations(step, t)
        gathered = Gathered.of(step, c, training=False)
        whole = max(gathered.forward, gathered.head)
        return self._at("evaluation", 0, stream, 0, max(block, chunk + 2 * stream), whole)


def _mlp_of_experts(step: StepSizes, block: BlockBytes) -> float:
    """Bytes per token in the backward pass of a block's experts: what its loops read, which they take out of what all
    layers keep, or what is computed again."""
    a, mode = step.architecture, step.plan.optimize.gradient_checkpointing
    taken = {"none": block.mlp, "selective": block.mlp_again + block.element * gate_and_up(a)}
    total = taken.get(mode, block.mlp_again) + block.element * a.hidden_size
    if step.kind == "cpu" and step.compute == 2 and mode in ("attention", "full"):
        total += 2 * gate_and_up(a)  # computed again in 16 bits, and then widened
    if step.kind == "tpu" and step.frozen_blocks and step.plan.optimize.base_storage != "none":
        total += block.element * gate_and_up(a)  # turned copies, as decoded matrices are turned
    return total


def _rounded_blocks(step: StepSizes, overlap: Overlap) -> int:
    """Bytes of a 16-bit copy of matrices that are stored in fp32."""
    o = step.plan.optimize
    narrow = step.frozen_blocks and (step.compute == 2 or o.base_storage != "none")
    # Only TPUs round the operands of products in fp32.
    if narrow or step.rounded or (step.compute == 4 and step.kind != "tpu"):
        return 0
    return int(overlap.rounded_blocks * 2 * step.sizes.layers * step.sizes.block_matrices)


def _rotations(step: StepSizes, tokens: int) -> int:
    """Bytes of the fp32 cosines and sines of `tokens` tokens, for each kind of layer. They exist per token only if
    documents are isolated, because positions then restart inside each row."""
    a = step.architecture
    if a.positions != "rope" or not step.plan.data.isolate_documents:
        return 0
    kinds = 2 if a.mixes_layers else 1
    kinds += a.scales_queries(step.sequence, local=False)
    return 8 * a.rotated_size * tokens * kinds


def _own_rotations(step: StepSizes) -> int:
    """Bytes of the cosines and sines that each layer keeps for itself if layers differ in them."""
    return _rotations(step, step.tokens) // 2 if step.architecture.mixes_layers else 0


def _loss(step: StepSizes, overlap: Overlap) -> tuple[int, int]:
    """Two byte counts: the logits and what else the head needs during the loss; and the head's gradient during the
    backward pass of the blocks."""
    a, t = step.architecture, step.tokens
    narrow = step.compute == 2 and step.kind != "cpu"
    # A frozen head is stored in 16 bits.
    casts = narrow and not step.rounded and step.flow.head
    cast = overlap.cast_head * 2 * step.head if casts else 0
    gradient = step.gradient * step.head if step.flow.head else 0
    chunked = step.plan.optimize.fused_loss
    if step.kind == "cpu":
        cast = 4 * step.head if step.compute == 2 else 0
        if chunked and step.plan.optimize.precision == "fp16":
            cast *= 3  # each of two products has its own head, and one is turned
        # The head's gradient is a separate tensor until it is added to the sum over chunks, or while the gradient of
        # the hidden states is computed.
        cast += gradient if not chunked or loss_chunk_tokens(step, t) < t else 0
    if chunked:
        if step.kind not in ("cpu", "tpu"):
            return _chunk_on_gpu(step) + (2 * step.head if casts else 0), gradient
        copies = overlap.chunk_16 if narrow else overlap.chunk
        return int(copies * 4 * a.vocab_size * loss_chunk_tokens(step, t) + cast), gradient
    padded = is_padded(step)
    copies = overlap.logits
    if narrow:
        copies = overlap.logits_16_padded if padded else overlap.logits_16
        gradient = min(gradient, 2 * step.head)
    copies += _capped_copies(step)
    # The gradient of the logits is there until that of the hidden states is made, which comes after the head's.
    beside: float = 0 if step.kind == "cpu" else gradient
    if padded:
        beside = overlap.padded_head * (2 if narrow else 4) * step.head
    if step.kind == "cpu" and step.plan.optimize.precision == "fp16":
        # XLA writes the gradient of the logits beside them, or over their capped copy. If the logits are small, two more casts
        # of the head need more.
        written = 0 if a.logit_cap else 4 * a.vocab_size * t
        beside = max(written, 2 * 4 * step.head)
    return int(copies * 4 * a.vocab_size * t + cast + beside), gradient


def _capped_copies(step: StepSizes) -> int:
    """How often XLA writes whole logits again, capped and in fp32. On a CPU and a GPU it does not compute a hyperbolic tangent
    twice, and the maximum and the sum of the logits both read it. On a GPU, capped logits overwrite logits in fp32."""
    writes = step.kind == "cpu" or (step.kind != "tpu" and step.compute == 2)
    return int(writes and step.architecture.logit_cap is not None)


def _chunk_on_gpu(step: StepSizes) -> int:
    """Bytes of a chunk's logits, or of their gradient and its two products. XLA pads the gradient and the head for the
    products. The head's gradient is a separate tensor until it is added to the sum over chunks."""
    c, padded = step.compute, is_padded(step)
    elements = step.architecture.vocab_size * loss_chunk_tokens(step, step.tokens)
    # In fp32 the gradient overwrites the logits, unless it is padded.
    logits = (4 + c if c == 2 or padded else 4) * elements
    products = c * (elements + padded * step.head) + (4 * step.head if step.flow.head else 0)
    return max(logits, products)


def _largest_array(step: StepSizes) -> int:
    s = step.sizes
    if step.kind != "cpu":
        return 0
    return 4 * max(s.embedding, s.head, s.block.largest * s.layers)
