"""Reads config.json of the families with RMSNorm and rotary positions: Llama and its relatives, and Gemma."""

from __future__ import annotations

from typing import Any

import msgspec

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.config_reader import Config, refusal
from memconsole.plan.models.layernorm_families import TANH_GELU
from memconsole.plan.models.rotary_config import all_local, rope, rotary_size


def _rms_decoder(
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
    if c.missing("head_dim") and head_size is None:
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


def llama(c: Config, default_theta: float = 10_000.0, **differences: Any) -> Architecture:
    """Llama, or a family that differs from it by `differences`: other defaults, and fields of the architecture."""
    c.only("hidden_act", "silu", ("silu",))
    for kind in c.layer_types():
        if kind != "full_attention":
            raise refusal(c.where, "layer_types", kind, "full_attention")
    theta, scaling = rope(c, "full_attention", default_theta)
    return _rms_decoder(c, family="llama", rope_theta=theta, rope_scaling=scaling, **differences)


def mistral(c: Config) -> Architecture:
    return _with_window(c, llama(c, max_positions=131_072))


def ministral3(c: Config) -> Architecture:
    """Ministral 3: a Mistral whose queries grow with their positions after those of pretraining."""
    if c.missing("rope_parameters") and c.missing("rope_scaling"):
        raise refusal(c.where, "rope_parameters", None, "the settings of its rotary positions")
    decoder = llama(c, 1_000_000.0, head_size=128, max_positions=262_144, norm_eps=1e-5)
    return _with_window(c, msgspec.structs.replace(decoder, family="ministral3"))


def phi3(c: Config) -> Architecture:
    """Phi-3 and Phi-4: a Llama whose query, key and value projections are one matrix in the file, as are gate and up."""
    decoder = llama(c, max_positions=4096)
    part = rotary_size(c, decoder.head_size, "partial_rotary_factor", 1.0)
    return _with_window(c, msgspec.structs.replace(decoder, family="phi3", rotary_size=part))


def granite(c: Config) -> Architecture:
    """Granite 3: a Llama with four multipliers."""
    return llama(
        c,
        attention_scale=c.number("attention_multiplier", 1.0),
        embedding_multiplier=c.number("embedding_multiplier", 1.0),
        residual_multiplier=c.number("residual_multiplier", 1.0),
        logits_scaling=c.number("logits_scaling", 1.0),
    )


def olmo2(c: Config) -> Architecture:
    """OLMo 2: a Llama with norms after attention and the MLP instead of before, and norms of all queries and all keys."""
    return llama(
        c,
        query_key_norm=True,
        joint_query_key_norm=True,
        pre_norms=False,
        post_norms=True,
        norm_eps=1e-5,
    )


def olmo3(c: Config) -> Architecture:
    """OLMo 3: an OLMo 2 in which three of four layers have a sliding window. Scaled rotary positions are those of the other
    layers alone."""
    c.only("hidden_act", "silu", ("silu",))
    theta, scaling = rope(c, "full_attention", 500_000.0)
    local_theta, local_scaling = rope(c, "sliding_attention", theta)
    if local_scaling is not None:
        raise refusal(c.where, "rope_parameters", local_scaling.kind, "no scaling of local layers")
    window, every = _window(c, 4)
    return _rms_decoder(
        c,
        family="llama",
        query_key_norm=True,
        joint_query_key_norm=True,
        pre_norms=False,
        post_norms=True,
        norm_eps=1e-5,
        rope_theta=theta,
        rope_local_theta=local_theta,
        rope_scaling=scaling,
        sliding_window=window,
        global_every=every,
    )


def exaone4(c: Config) -> Architecture:
    """EXAONE 4: an OLMo 3 whose norms of queries and keys are those of each head. If there are layers with a sliding window,
    the others do not rotate queries and keys."""
    c.only("hidden_act", "silu", ("silu",))
    theta, scaling = rope(c, "full_attention", 10_000.0)
    windows: dict[str, Any] = {}
    if not c.says_none("sliding_window"):
        window, every = _window(c, 4)
        if window is None:
            expected = "null if no layer has a sliding window"
            raise refusal(c.where, "sliding_window", c.size("sliding_window", 4096), expected)
        windows = {
            "sliding_window": window,
            "global_every": every,
            "unrotated_every": every,
            "rope_local_theta": theta,
            "scaled_local_layers": scaling is not None,
        }
    return _rms_decoder(
        c,
        family="llama",
        query_key_norm=True,
        pre_norms=False,
        post_norms=True,
        norm_eps=1e-5,
        rope_theta=theta,
        rope_scaling=scaling,
        **windows,
    )


def ernie4_5(c: Config) -> Architecture:
    """ERNIE 4.5: a Llama that rotates pairs of neighbouring elements."""
    decoder = llama(
        c, 500_000.0, head_size=128, max_positions=131_072, norm_eps=1e-5, tied_embeddings=True
    )
    return msgspec.structs.replace(decoder, family="ernie4_5")


def seed_oss(c: Config) -> Architecture:
    """Seed-OSS: a Qwen 2 whose heads may be wider than their share of the stream."""
    biases = c.flag("attention_bias", True)
    decoder = llama(c, head_size=128, max_positions=524_288, projection_biases=biases)
    return msgspec.structs.replace(decoder, family="seed_oss")


def glm(c: Config, **differences: Any) -> Architecture:
    """GLM-4: a Llama that rotates pairs of neighbouring elements of the first half of each head. Gate and up are one matrix
    in the file."""
    biases = c.flag("attention_bias", True)
    decoder = llama(
        c,
        head_size=128,
        max_positions=131_072,
        norm_eps=1.5625e-7,
        projection_biases=biases,
        **differences,
    )
    part = rotary_size(c, decoder.head_size, "partial_rotary_factor", 0.5)
    return msgspec.structs.replace(decoder, family="glm", rotary_size=part)


def glm4(c: Config) -> Architecture:
    """GLM-4-0414: a GLM-4 with norms after attention and the MLP, too."""
    return glm(c, post_norms=True)


def smollm3(c: Config) -> Architecture:
    """SmolLM3: a Llama in which some layers do not rotate queries and keys (NoPE)."""
    decoder = llama(c, max_positions=32_768, tied_embeddings=True, default_theta=2_000_000.0)
    every = c.size("no_rope_layer_interval", 4)
    rotates = c.flags("no_rope_layers")[: decoder.layers]
    if rotates:
        every = rotates.index(False) + 1 if False in rotates else 0
        expected = [not every or (layer + 1) % every != 0 for layer in range(decoder.layers)]
        if rotates != expected:
            raise refusal(
                c.where,
                "no_rope_layers",
                rotates,
                f"{decoder.layers} entries, with 0 for every n-th",
            )
    return msgspec.structs.replace(decoder, unrotated_every=every)


def mixtral(c: Config) -> Architecture:
    """Mixtral: a Mistral with experts."""
    decoder = llama(c, max_positions=131_072, default_theta=1_000_000.0, norm_eps=1e-5)
    decoder = msgspec.structs.replace(decoder, family="mixtral")
    return _with_window(c, _with_experts(c, decoder, (8, 2), normalized=True))


def qwen3_moe(c: Config) -> Architecture:
    """Qwen3 MoE: a Qwen3 with experts in every layer."""
    inner = c.size("moe_intermediate_size", 768)
    decoder = llama(c, query_key_norm=True, max_positions=32_768, intermediate_size=inner)
    return _with_experts(c, decoder, (128, 8), normalized=c.flag("norm_topk_prob", False))


def olmoe(c: Config) -> Architecture:
    """OLMoE: a Llama with experts, and norms of all queries and all keys."""
    decoder = llama(
        c, query_key_norm=True, joint_query_key_norm=True, max_positions=4096, norm_eps=1e-5
    )
    return _with_experts(c, decoder, (64, 8), normalized=c.flag("norm_topk_prob", False))


def granite_moe(c: Config) -> Architecture:
    """Granite 3 MoE: a Granite with experts."""
    decoder = msgspec.structs.replace(granite(c), family="granite_moe")
    return _with_experts(c, decoder, (8, 2), normalized=True)


def _with_experts(
    c: Config, decoder: Architecture, usual: tuple[int, int], *, normalized: bool
) -> Architecture:
    """`decoder` with experts in every block. `usual`: how many there are, and how many of them a token goes to, if the file
    does not say. Raises `PlanError`."""
    count = c.size("num_experts", c.size("num_local_experts", usual[0]))
    picked = c.size("num_experts_per_tok", usual[1])
    if picked > count:
        raise refusal(c.where, "num_experts_per_tok", picked, f"at most the {count} experts")
    return msgspec.structs.replace(
        decoder, experts=count, experts_per_token=picked, normalized_shares=normalized
    )


def _with_window(c: Config, decoder: Architecture) -> Architecture:
    """`decoder` with a sliding window in every layer, if the file names one that is shorter than the model's rows."""
    window = c.size("sliding_window", decoder.max_positions)
    return decoder if window >= decoder.max_positions else all_local(decoder, window)


def qwen2(c: Config) -> Architecture:
    return llama(c, projection_biases=True, max_positions=32_768)


def qwen3(c: Config) -> Architecture:
    return llama(c, query_key_norm=True, max_positions=32_768, head_size=128)


_GEMMA: dict[str, Any] = {
    "activation": "gelu_tanh",
    "norm_unit_offset": True,
    "scale_embeddings": True,
    "head_size": 256,
    "tied_embeddings": True,
}
"""What all generations of Gemma have, the head's size and tied embeddings unless the file says otherwise."""


def gemma(c: Config) -> Architecture:
    # Files from before transformers 4.39 say "gelu", but the model was trained with the tanh approximation.
    if c.missing("hidden_activation"):
        c.only("hidden_act", TANH_GELU[1], (*TANH_GELU, "gelu"))
    else:
        c.only("hidden_activation", None, TANH_GELU)
    theta, scaling = rope(c, "full_attention", 10_000.0)
    return _rms_decoder(
        c,
        family="gemma",
        **_GEMMA,
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=8192,
    )


def gemma2(c: Config) -> Architecture:
    c.only("hidden_activation", TANH_GELU[1], TANH_GELU)
    theta, scaling = rope(c, "full_attention", 10_000.0)
    window, every = _window(c, 2)
    return _rms_decoder(
        c,
        family="gemma2",
        **_GEMMA,
        post_norms=True,
        attention_scale=c.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_cap=_cap(c, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(c, "final_logit_softcapping", 30.0),
        rope_theta=theta,
        rope_local_theta=theta,
        rope_scaling=scaling,
        scaled_local_layers=window is not None and scaling is not None,
        sliding_window=window,
        global_every=every,
        max_positions=8192,
    )


def _cap(c: Config, key: str, default: float) -> float | None:
    """A cap of scores or logits; null is none."""
    return None if c.says_none(key) else c.number(key, default)


def gemma3(c: Config) -> Architecture:
    c.only("hidden_activation", TANH_GELU[1], TANH_GELU)
    theta, scaling = rope(c, "full_attention", 1_000_000.0)
    local_theta, local_scaling = rope(c, "sliding_attention", 10_000.0)
    if local_scaling is not None:
        raise refusal(c.where, "rope_parameters", local_scaling.kind, "no scaling of local layers")
    window, every = _window(c, 6)
    return _rms_decoder(
        c,
        family="gemma3",
        **_GEMMA,
        query_key_norm=True,
        post_norms=True,
        attention_scale=c.number("query_pre_attn_scalar", 256.0) ** -0.5,
        rope_theta=theta,
        rope_local_theta=local_theta,
        rope_scaling=scaling,
        sliding_window=window,
        global_every=every,
        max_positions=131_072,
    )


def _window(c: Config, usual: int) -> tuple[int | None, int]:
    """(sliding_window, global_every) of Gemma 2 and 3, OLMo 3 and EXAONE 4; (None, 1) if every layer is global."""
    layers = c.size("num_hidden_layers")
    kinds = c.layer_types()
    if not kinds:
        every = c.size("sliding_window_pattern", c.size("_sliding_window_pattern", usual))
    else:
        if len(kinds) != layers:
            raise refusal(c.where, "layer_types", len(kinds), f"{layers} entries, one a layer")
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        every = full[0] + 1 if full else layers + 1
        for i, kind in enumerate(kinds):
            expected = "sliding_attention" if (i + 1) % every else "full_attention"
            if kind != expected:
                raise refusal(c.where, "layer_types", kind, f"{expected} in layer {i}")
    if every == 1:
        return None, 1
    return c.size("sliding_window", 4096), every
