"""A JAX training step as a sequence of moments: what XLA's one program holds when, in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory.activations import jax_block
from memconsole.memory.moments import Moment, Step


def moments(step: Step) -> Iterator[Moment]:
    """Every moment of a step, an evaluation and a checkpoint that can be the largest of its phase."""
    a, s, o, t = step.architecture, step.sizes, step.plan.optimize, step.tokens
    block = jax_block(a, o.precision, o.gradient_checkpointing, step.kind, o.lora_rank > 0)
    stream = step.compute * a.hidden_size * t
    score = t * step.sequence
    kept = (block.kept * t + block.kept_scores * score) * s.layers
    if o.activation_offload:
        kept = 0
    again = block.recomputed * t + block.recomputed_scores * score
    forward = block.passing * t + block.passing_scores * score
    backward = block.backward * t + block.backward_scores * score
    n = t * a.vocab_size
    model, resident, standing = step.weights + step.gathered, step.state.resident, step.standing
    logits = 0 if o.fused_loss else 8 * n

    def at(phase: str, gradients: int, live: int, loss: int, work: int) -> Moment:
        return Moment(phase, model, gradients, resident, live, loss, work, step.data)

    yield at("forward", standing, kept + stream, 0, forward)
    yield at("loss", standing, kept + stream, logits, 0)
    yield at("backward", standing + 4 * step.head, kept + stream, logits, 0)
    yield at("backward", standing + step.gradients, kept + again, 0, backward)
    yield Moment(
        "optimizer step", step.weights, step.gradients, step.state.at_step, 0, 0,
        step.state.temporaries,
    )  # fmt: skip
    yield at("evaluation", 0, stream, 0, forward)
    yield Moment("checkpoint", step.weights, 0, resident, 0, 0, 4 * s.used.largest)
