"""A JAX training step as a sequence of moments, with the bytes that are live at each.

Follows `backends/memconsole_jax`. Sizes of the arguments (weights, state, batch) are exact; outputs reuse donated
arguments. XLA decides which temporaries are alive together: the number of copies of each was measured
(coefficients.json, `xla`). Symbols in comments: T tokens, V vocabulary, h hidden, f intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory.activations.dropping import BITS, MASK, dropping_bytes
from memconsole.memory.activations.jax_block import BlockBytes, jax_block
from memconsole.memory.activations.jax_experts import filled_up, gate_and_up, looping
from memconsole.memory.activations.jax_gathered import Gathered, is_padded
from memconsole.memory.coefficients import Overlap, xla
from memconsole.memory.state.step_sizes import Moment, StepSizes
from memconsole.plan.models.architecture import Architecture

CHUNK_TOKENS = 1024
"""`memconsole_jax.techniques.activations.fused_loss.CHUNK_TOKENS`."""
CPU_CHUNK_TOKENS = 128
"""`memconsole_jax.techniques.activations.fused_loss.CPU_CHUNK_TOKENS`."""
SCORE_BYTES = 32 * 2**20
"""`memconsole_jax.models.attention.SCORE_BYTES`."""
CPU_SCORE_BYTES = 4 * 2**20
"""`memconsole_jax.models.attention.CPU_SCORE_BYTES`."""
CPU_ROWS_BYTES = 2 * 2**20
"""`memconsole_jax.models.attention.CPU_ROWS_BYTES`."""
FEWEST_QUERIES = 64
"""`memconsole_jax.models.attention.FEWEST_QUERIES`."""
CPU_QUERIES = 128
"""`memconsole_jax.models.attention.CPU_QUERIES`."""
CPU_GROUPS = 4
"""`memconsole_jax.models.attention.CPU_GROUPS`."""
EVALUATED_SCORES = 1.1
"""How many chunks of attention scores are live beside the tensors of an MLP in an evaluation on a CPU. (From XLA's plans
of the evaluations of seven models of 1 to 30 M parameters, on rows of 64 to 1,024 tokens.) A backward pass needs more."""
PACKED_DEPTH = 600
"""Eigen copies the operands of a product slice by slice, along the axis that the product sums over. Two slices of about 300
are in memory at a time (Eigen's `TensorContractionThreadPool.h`; measured as what products in XLA's programs allocate)."""
PACKED_PRODUCTS = 2
"""How many products XLA computes at the same time on a CPU."""
MERGED_BYTES = 32 * 2**20
"""XLA for GPUs joins two products of the same tensor if the operands and the result of one of them are not larger
(`xla_gpu_dot_merger_threshold_mb`)."""


def moments(step: StepSizes) -> Iterator[Moment]:
    """Every moment of a step, an evaluation and a checkpoint that can be the peak of its phase."""
    a, s, o, t = step.architecture, step.sizes, step.plan.optimize, step.tokens
    learned = a.positions == "learned"
    overlap = xla(step.kind, step.plan.device.name, learned_positions=learned)
    block = jax_block(
        a, o.precision, o.gradient_checkpointing, step.kind, o.lora_rank, o.lora_targets
    )
    c, stream = block.element, 4 * a.hidden_size * t
    one_kept = block.kept * t
    one_kept += _own_rotations(step) if o.gradient_checkpointing == "none" else 0
    one_kept += filled_up(step, c) if o.gradient_checkpointing in ("none", "selective") else 0
    kept = one_kept * s.layers
    if (
        o.activation_offload
    ):  # except on a CPU, the next block's activations are already being copied
        kept = one_kept * min(s.layers, 1 if step.kind == "cpu" else 2)
    kept += _rotations(step, t)
    standing, resident = step.standing, step.state.resident
    logits, made_head = _loss(step, overlap)
    head = step.gradient * step.head if step.flow.head else 0
    looked_up = step.gradient * s.embedding if step.flow.table else 0
    blocks = max(0, step.gradients - (head + (looked_up if s.head else 0)) // step.shards)
    if (
        step.accumulates and not step.frozen_blocks
    ):  # the backward pass adds each to the accumulated sum
        blocks //= s.layers
        # Several devices first add up their gradients of the head. Except on a CPU, the total has memory of its own.
        whole = 0 if step.plan.device.count == 1 else 1 if step.kind == "cpu" else 2
        head, made_head = whole * head, whole * made_head

    gathered = Gathered.of(step, c)

    def at(phase: str, gradients: int, live: int, loss: int, work: float, whole: int) -> Moment:
        model = step.weights + whole
        work += copies + (0 if phase == "evaluation" else masked)
        return Moment(phase, model, gradients, resident, live, loss, int(work), step.data)

    rows, drops = step.plan.train.batch_size, step.plan.train.attention_dropout > 0
    one_chunk = score_bytes(step, rows, dropping=drops)
    scores = overlap.scores * one_chunk
    copies, masked = _rounded_blocks(step, overlap), _masked_scores(step, one_chunk)
    dropping = dropping_bytes(step) * t
    if drops:
        dropping += one_chunk // 4 * (MASK + BITS)
    # Of attention: the stream, its norm, queries, keys, values and the output.
    attending = ((4 + c) * a.hidden_size + 2 * c * (a.query_width + a.key_width)) * t + scores
    passing = max(block.passing * t + looping(step, c, training=False), attending) + dropping
    yield at("forward", standing, kept + stream, 0, passing, gathered.forward)
    allocated = overlap.early_blocks_chunked if o.fused_loss else overlap.early_blocks
    early = int(allocated * blocks) + (head if o.fused_loss else 0)
    yield at("loss", standing + early, kept, logits, overlap.loss_stream * stream, gathered.head)
    # Without checkpointing, the slice of the block that is being computed exists twice: in the stack and as a copy.
    share = overlap.slice if o.gradient_checkpointing == "none" else 0.0
    again = overlap.again if c == 4 else 1.0
    if a.experts:
        of_mlp = again * block.attention_again + _mlp_of_experts(step, block)
    else:
        inner = (overlap.mlp_16 if step.compute == 2 else overlap.mlp) * c * a.intermediate_size
        of_mlp = again * (block.attention_again + block.mlp_again) + share * block.mlp + inner
    of_mlp += block.adapters_again
    if c * t * (a.hidden_size + o.lora_rank) <= MERGED_BYTES:
        of_mlp += block.merged_again
    of_attention = again * block.attention_again + share * block.attention
    of_attention += overlap.heads * c * a.query_width
    if one_chunk:  # gradients of keys and values are summed in fp32
        of_attention += 2 * (4 - c) * a.key_width
    layer = overlap.layer * c * (s.block_matrices - s.block_experts)
    through_mlp = dropping + of_mlp * t + overlap.mlp_stream * stream + layer
    through_mlp += looping(step, c, training=True)
    through_attention = dropping + of_attention * t + scores + overlap.heads_stream * stream + layer
    summed = standing + blocks + made_head
    yield at("backward", summed, kept, 0, through_mlp, gathered.backward)
    yield at("backward", summed, kept, 0, through_attention, gathered.backward)
    yield at("backward", summed + looked_up, 0, 0, stream, gathered.backward)
    yield Moment(
        "optimizer step",
        weights=step.weights,
        gradients=step.gradients,
        state=step.state.at_step,
        workspace=step.state.temporaries,
        data=step.data,
    )
    evaluated = step.evaluation_tokens
    stream = 4 * a.hidden_size * evaluated
    copies_of_scores = EVALUATED_SCORES if step.kind == "cpu" else overlap.scores
    passing = block.passing * evaluated + looping(step, c, training=False)
    passing += copies_of_scores * score_bytes(step, step.plan.evaluation_batch)
    copies_of_logits = overlap.chunk_16 if c == 2 else overlap.chunk
    chunk = int(copies_of_logits * 4 * a.vocab_size * _chunk(step, evaluated))
    stream += _rotations(step, evaluated)
    work = max(passing, chunk + 2 * stream)
    gathered = Gathered.of(step, c, training=False)
    yield at("evaluation", 0, stream, 0, work, max(gathered.forward, gathered.head))
    yield Moment(  # one array at a time is copied to be written
        "checkpoint", weights=step.weights, state=resident, workspace=_largest_array(step)
    )


def _mlp_of_experts(step: StepSizes, block: BlockBytes) -> float:
    """Bytes per token in the backward pass of a block's experts: what its loops read, which they take out of what all
    layers keep, or what is computed again."""
    a, mode = step.architecture, step.plan.optimize.gradient_checkpointing
    taken = {"none": block.mlp, "selective": block.mlp_again + block.element * gate_and_up(a)}
    found = taken.get(mode, block.mlp_again) + block.element * a.hidden_size
    if step.kind == "cpu" and step.compute == 2 and mode in ("attention", "full"):
        found += 2 * gate_and_up(a)  # computed again in 16 bits, and then widened
    if step.kind == "tpu" and step.frozen_blocks and step.plan.optimize.base_storage != "bf16":
        found += block.element * gate_and_up(a)  # turned copies, as decoded matrices are turned
    return found


def _masked_scores(step: StepSizes, one_chunk: int) -> int:
    """Bytes of the scores of masked keys. XLA on a CPU makes them before the loop over blocks, for the chunks of each
    group, unless blocks are recomputed."""
    groups = min(CPU_GROUPS, -(-step.sequence // CPU_QUERIES))
    if step.kind != "cpu" or groups == 1 or step.plan.optimize.gradient_checkpointing != "none":
        return 0
    return one_chunk * (groups + 1) // 2


def _rounded_blocks(step: StepSizes, overlap: Overlap) -> int:
    """Bytes of a 16-bit copy of matrices that are stored in fp32."""
    o = step.plan.optimize
    narrow = step.frozen_blocks and (step.compute == 2 or o.base_storage != "bf16")
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
    return 8 * a.rotated_size * tokens * (2 if a.mixes_layers else 1)


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
        cast += gradient if not chunked or _chunk(step, t) < t else 0
    if chunked:
        if step.kind not in ("cpu", "tpu"):
            return _chunk_on_gpu(step) + (2 * step.head if casts else 0), gradient
        copies = overlap.chunk_16 if narrow else overlap.chunk
        return int(copies * 4 * a.vocab_size * _chunk(step, t) + cast), gradient
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
    elements = step.architecture.vocab_size * _chunk(step, step.tokens)
    # In fp32 the gradient overwrites the logits, unless it is padded.
    logits = (4 + c if c == 2 or padded else 4) * elements
    products = c * (elements + padded * step.head) + (4 * step.head if step.flow.head else 0)
    return max(logits, products)


def library_bytes(step: StepSizes) -> int:
    """Bytes of the operands that Eigen packs in a step on a CPU, in addition to what XLA plans. Except in the fast heap,
    their memory is free again after each product. Those of the head come before most of the step's arrays are written, so
    that one product of a block is what the peak has."""
    if step.kind != "cpu":
        return 0
    a, t = step.architecture, step.tokens
    scored = _chunk(step, t) if step.plan.optimize.fused_loss else t
    h, f = a.hidden_size, _multiplied(a)
    if step.plan.optimize.heap != "fast":
        return _packed(t, h, f)
    return PACKED_PRODUCTS * max(_packed(t, h, f), _packed(scored, h, a.vocab_size))


def forward_library_bytes(step: StepSizes, rows: int) -> int:
    """The same for a forward pass of `rows` rows, which computes logits in chunks."""
    if step.kind != "cpu":
        return 0
    a, t = step.architecture, step.sequence * rows
    h, f = a.hidden_size, _multiplied(a)
    of_block = max(_packed_along(h, t, f), _packed_along(f, t, h))
    if step.plan.optimize.heap != "fast":
        return of_block
    return PACKED_PRODUCTS * max(of_block, _packed_along(h, _chunk(step, t), a.vocab_size))


def _multiplied(a: Architecture) -> int:
    """Outputs of the widest product of all tokens in a block. An expert's products are of the tokens of one tile."""
    return a.query_width if a.experts else a.intermediate_size


def _packed(*sizes: int) -> int:
    """The most bytes that Eigen packs in one of the three products of a matrix: of the inputs, their gradients and the
    matrix's own. Each of the sizes is summed over in one of them."""
    total = sum(sizes)
    return max(_packed_along(size, total - size) for size in sizes)


def _packed_along(summed: int, *others: int) -> int:
    """Bytes that Eigen packs in a product that sums over an axis of `summed` elements. `others`: the sizes of the other
    axes of its operands."""
    return 4 * sum(others) * min(summed, PACKED_DEPTH)


def score_bytes(step: StepSizes, rows: int, *, dropping: bool = False) -> int:
    """Bytes of the fp32 attention scores of one chunk of queries over `rows` rows; 0 if cuDNN's fused attention runs.
    `dropping`: whether attention weights are dropped."""
    a, length = step.architecture, step.sequence
    isolated, capped = step.plan.data.isolate_documents, a.attention_cap is not None
    written_out = a.windowed(length) or isolated or capped or dropping
    fits_cudnn = a.head_size % 8 == 0 and a.head_size <= 128 and not written_out
    if step.kind == "gpu" and step.compute == 2 and fits_cudnn:
        return 0
    query = 4 * a.heads * length  # bytes of one query's scores
    most = SCORE_BYTES // (rows * query)
    if step.kind == "cpu":
        most = min(CPU_SCORE_BYTES // query, max(CPU_QUERIES, -(-length // CPU_GROUPS)))
    chunks = -(-length // min(length, max(FEWEST_QUERIES, most)))
    queries = -(-length // chunks)
    if step.kind == "cpu":
        most = max(1, CPU_ROWS_BYTES // (query * queries))
        rows = max(n for n in range(1, min(rows, most) + 1) if rows % n == 0)
    return rows * queries * query


def _chunk(step: StepSizes, tokens: int) -> int:
    """Tokens whose logits exist at a time. Chunks have equal size, at most `CHUNK_TOKENS` (CPU: `CPU_CHUNK_TOKENS`)."""
    most = CPU_CHUNK_TOKENS if step.kind == "cpu" else CHUNK_TOKENS
    chunks = -(-tokens // most)
    return -(-tokens // chunks)


def _largest_array(step: StepSizes) -> int:
    s = step.sizes
    if step.kind != "cpu":
        return 0
    return 4 * max(s.embedding, s.head, s.block.largest * s.layers)
