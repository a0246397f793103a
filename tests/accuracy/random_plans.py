"""Small random models and plans over all families and settings that both backends train."""

from __future__ import annotations

import random
from typing import Any

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace

OPTIMIZERS = ("adamw", "adamw", "adamw-8bit", "adafactor", "lion", "sgd")
FAMILIES = ("gpt2", "llama", "qwen", "gemma", "gemma3")


def draw(rng: random.Random, backend: str) -> tuple[Architecture, Plan]:
    """A model of well under two million weights and a plan for it."""
    return _architecture(rng), _plan(rng, backend)


def _architecture(rng: random.Random) -> Architecture:
    family = rng.choice(FAMILIES)
    heads, head_size = rng.choice((2, 4)), rng.choice((16, 32, 64))
    hidden = heads * head_size
    vocab_size, layers = rng.choice((300, 1000, 4000, 8000)), rng.choice((2, 3, 4, 6))
    multiple, kv_heads = rng.choice((2, 3, 4)), rng.choice((1, heads))
    tied, window = rng.random() < 0.5, rng.choice((32, 600))
    gated, gemma3 = family != "gpt2", family == "gemma3"
    return of_family(
        family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads if gated else heads,
        head_size=head_size,
        intermediate_size=hidden * (multiple if gated else 4),
        max_positions=512,
        tied_embeddings=tied or family in ("gpt2", "gemma", "gemma3"),
        sliding_window=window if gemma3 else None,
        global_every=2 if gemma3 else 1,
    )


def of_family(family: str, **sizes: Any) -> Architecture:
    """A decoder of one of `FAMILIES`, of any sizes."""
    gated, gemma3 = family != "gpt2", family == "gemma3"
    gemma = family in ("gemma", "gemma3")
    return Architecture(
        family="llama" if family == "qwen" else family,  # type: ignore[arg-type]
        norm="rmsnorm" if gated else "layernorm",
        norm_unit_offset=gemma,
        activation="silu" if gated and not gemma else "gelu_tanh",
        gated_mlp=gated,
        biases=not gated,
        positions="rope" if gated else "learned",
        scale_embeddings=gemma,
        query_key_norm=family in ("qwen", "gemma3"),
        post_norms=gemma3,
        **sizes,
    )


def _plan(rng: random.Random, backend: str) -> Plan:
    return replace(
        Plan(),
        {
            "backend": backend,
            "data.sequence_length": rng.choice((32, 64, 128, 256)),
            "train.batch_size": rng.choice((1, 2, 4, 8)),
            "optimize.precision": rng.choice(("fp32", "bf16")),
            "optimize.gradient_checkpointing": rng.choice(("none", "selective", "full")),
            "optimize.accumulation_steps": rng.choice((1, 1, 3)),
            "optimize.optimizer": rng.choice(OPTIMIZERS),
            "optimize.fused_loss": rng.random() < 0.4,
        },
    )


def describe(plan: Plan, architecture: Architecture) -> str:
    """Both in one line."""
    a, o = architecture, plan.optimize
    return (
        f"{a.family}{' qk-norm' if a.query_key_norm else ''} hidden {a.hidden_size} layers {a.layers} "
        f"vocab {a.vocab_size} mlp {a.intermediate_size} heads {a.heads}/{a.kv_heads} "
        f"{'tied' if a.tied_embeddings else 'untied'} batch {plan.train.batch_size} "
        f"length {plan.data.sequence_length} {o.precision} checkpointing {o.gradient_checkpointing} "
        f"accumulation {o.accumulation_steps} {o.optimizer}{' chunked loss' if o.fused_loss else ''}"
    )
