"""A JAX training step as a sequence of moments: what XLA's one program holds when, in bytes.

Follows `backends/memconsole_jax`: arguments (weights, state, batch) are exact; donated ones become the outputs.
XLA decides which temporaries coexist: how many copies of each overlap was measured (coefficients.json, `xla`).
In comments T tokens, V vocabulary, h hidden, f intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory.activations import jax_block
from memconsole.memory.coefficients import xla
from memconsole.memory.moments import Moment, Step

CHUNK_TOKENS = 1024
"""`memconsole_jax.fused_loss.CHUNK_TOKENS`."""
SCORE_BYTES = 32 * 2**20
"""`memconsole_jax.attention.SCORE_BYTES`."""
FEWEST_ROWS = 64
"""`memconsole_jax.attention.FEWEST_ROWS`."""


def moments(step: Step) -> Iterator[Moment]:
    """Every moment of a step, an evaluation and a checkpoint that can be the largest of its phase."""
    a, s, o, t = step.architecture, step.sizes, step.plan.optimize, step.tokens
    overlap = xla(step.kind)
    block = jax_block(a, o.precision, o.gradient_checkpointing, step.kind, o.lora_rank)
    stream = 4 * a.hidden_size * t
    wide = block.element * a.intermediate_size * t
    kept = block.kept * t * s.layers
    if o.activation_offload:
        kept = min(kept, 2 * block.kept * t)
    scores = score_bytes(step)
    narrow = step.compute == 2 and step.kind != "cpu"
    chunk = int((overlap.chunk_16 if narrow else overlap.chunk) * 4 * a.vocab_size * _chunk(t))
    whole = int((overlap.logits_16 if narrow else overlap.logits) * 4 * a.vocab_size * t)
    logits = chunk if o.fused_loss else whole
    model, resident, standing = step.weights + step.gathered, step.state.resident, step.standing
    head = 0 if step.frozen else 4 * step.head
    blocks = max(
        0, step.gradients - (head + (0 if s.head == 0 else 4 * s.embedding)) // step.shards
    )
    early = int(overlap.early_blocks * blocks + overlap.early_head * head)
    if standing:
        early = int(overlap.accumulated_blocks * blocks + overlap.accumulated_head * head)

    def at(phase: str, gradients: int, live: int, loss: int, work: int) -> Moment:
        return Moment(phase, model, gradients, resident, live, loss, work, step.data)

    passing = block.passing * t + int(overlap.scores * scores)
    yield at("forward", standing, kept + stream, 0, passing)
    yield at("loss", standing, kept, logits, 3 * stream)
    yield at("backward", standing + early, kept, logits, 3 * stream)
    # A block without checkpointing has one more of everything it kept: the slice that is worked on.
    share = overlap.slice if o.gradient_checkpointing == "none" else overlap.block
    again = int(share * block.recomputed * t)
    work = overlap.scores * scores + overlap.stream * stream + overlap.mlp * wide
    summed = max(standing, step.gradients)
    yield at("backward", summed, kept + again, 0, int(work))
    yield Moment(
        "optimizer step",
        weights=step.weights,
        gradients=step.gradients,
        state=step.state.at_step,
        workspace=step.state.temporaries,
        data=step.data,
    )
    yield at("evaluation", 0, stream, 0, max(passing, chunk + 2 * stream))
    yield Moment(  # one array at a time is copied to be written
        "checkpoint", weights=step.weights, state=resident, workspace=_largest_array(step)
    )


def score_bytes(step: Step) -> int:
    """fp32 attention scores of one chunk of queries; none where cuDNN's fused attention takes them."""
    a, length, rows = step.architecture, step.sequence, step.plan.train.batch_size
    windowed = a.sliding_window is not None and a.sliding_window < length
    fits_cudnn = a.head_size % 8 == 0 and a.head_size <= 128 and not windowed
    if step.kind == "gpu" and step.compute == 2 and fits_cudnn:
        return 0
    row = 4 * rows * a.heads * length
    most = min(length, max(FEWEST_ROWS, SCORE_BYTES // row))
    chunks = -(-length // most)
    return row * -(-length // chunks)


def _chunk(tokens: int) -> int:
    """Tokens whose logits exist at a time: equal chunks of at most CHUNK_TOKENS."""
    chunks = -(-tokens // CHUNK_TOKENS)
    return -(-tokens // chunks)


def _largest_array(step: Step) -> int:
    s = step.sizes
    if step.kind != "cpu":
        return 0
    return 4 * max(s.embedding, s.head, s.block.largest * s.layers)
