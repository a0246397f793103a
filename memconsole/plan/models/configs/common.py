"""What families have in common that read RMSNorm, rotary positions or sliding windows from a config.json."""

from __future__ import annotations

from typing import Any

import msgspec

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.configs.reader import Config, refusal


def rms_decoder(
    c: Config,
    head_size: int | None = None,
    max_positions: int = 2048,
    norm_eps: float = 1e-6,
    tied_embeddings: bool = False,
    intermediate_size: int | None = None,
    **rest: Any,
) -> Architecture:
    """The settings that Llama, Qwen 3 and all Gemmas have in common. The named arguments are the defaults of transformers'
    configuration class; `rest` are fields of the architecture."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    if c.says_none("head_dim") or (c.missing("head_dim") and head_size is None):
        head_size = c.quotient("hidden_size", hidden, heads)
    return Architecture(
        vocab_size=c.size("vocab_size"),
        hidden_size=hidden,
        layers=c.size("num_hidden_layers"),
        heads=heads,
        kv_heads=c.size("num_key_value_heads", heads),
        head_size=c.size("head_dim", head_size),
        intermediate_size=intermediate_size or c.size("intermediate_size"),
        max_positions=c.size("max_position_embeddings", max_positions),
        norm="rmsnorm",
        norm_eps=c.number("rms_norm_eps", norm_eps),
        tied_embeddings=c.flag("tie_word_embeddings", tied_embeddings),
        initializer_range=c.number("initializer_range", 0.02),
        **rest,
    )


def with_window(c: Config, decoder: Architecture, default: int | None = None) -> Architecture:
    """`decoder` with a sliding window in every layer, if the file names one that is shorter than the model's rows, or
    names none and the family has a `default`."""
    window = c.size("sliding_window", default or decoder.max_positions)
    return decoder if window >= decoder.max_positions else all_local(decoder, window)


def all_local(decoder: Architecture, window: int) -> Architecture:
    """`decoder` with a sliding window of `window` keys in every layer."""
    return msgspec.structs.replace(
        decoder,
        sliding_window=window,
        global_every=decoder.layers + 1,
        rope_local_theta=decoder.rope_theta,
        scaled_local_layers=decoder.rope_scaling is not None,
    )


def layers_with_window(c: Config, usual: int) -> tuple[int | None, int]:
    """(sliding_window, global_every) of Gemma 2 and 3, OLMo 3 and EXAONE 4; (None, 1) if every layer is global."""
    kinds = c.layer_types()
    if kinds:
        every = _global_every(c, kinds)
    else:
        every = c.size("sliding_window_pattern", c.size("_sliding_window_pattern", usual))
    return (None, 1) if every == 1 else (c.size("sliding_window", 4096), every)


def _global_every(c: Config, kinds: list[str]) -> int:
    """The n of which every n-th layer is global, from the kind of each layer. Raises `PlanError` if there is none."""
    layers = c.size("num_hidden_layers")
    if len(kinds) != layers:
        raise refusal(c.where, "layer_types", len(kinds), f"{layers} entries, one a layer")
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    every = full[0] + 1 if full else layers + 1
    for i, kind in enumerate(kinds):
        expected = "sliding_attention" if (i + 1) % every else "full_attention"
        if kind != expected:
            raise refusal(c.where, "layer_types", kind, f"{expected} in layer {i}")
    return every
