"""Reads config.json of Llama and the families that are like it."""

from __future__ import annotations

from typing import Any

import msgspec

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.configs.common import layers_with_window, rms_decoder, with_window
from memconsole.plan.models.configs.reader import Config, refusal
from memconsole.plan.models.configs.rotary import rope, rotary_size


def llama(c: Config, default_theta: float = 10_000.0, **differences: Any) -> Architecture:
    """Llama, or a family that differs from it by `differences`: other defaults, and fields of the architecture."""
    c.only("hidden_act", "silu", ("silu",))
    for kind in c.layer_types():
        if kind != "full_attention":
            raise refusal(c.where, "layer_types", kind, "full_attention")
    theta, scaling = rope(c, "full_attention", default_theta)
    return rms_decoder(c, family="llama", rope_theta=theta, rope_scaling=scaling, **differences)


def mistral(c: Config) -> Architecture:
    decoder = llama(c, max_positions=131_072)
    return decoder if c.says_none("sliding_window") else with_window(c, decoder, 4096)


def ministral3(c: Config) -> Architecture:
    """Ministral 3: a Mistral whose queries grow with their positions after those of pretraining."""
    if c.missing("rope_parameters") and c.missing("rope_scaling"):
        raise refusal(c.where, "rope_parameters", None, "the settings of its rotary positions")
    decoder = llama(c, 1_000_000.0, head_size=128, max_positions=262_144, norm_eps=1e-5)
    if decoder.rope_scaling is None or decoder.rope_scaling.kind != "yarn":
        kind = decoder.rope_scaling.kind if decoder.rope_scaling else "default"
        raise refusal(c.where, "rope_type", kind, "yarn: anything else is not supported")
    return with_window(c, msgspec.structs.replace(decoder, family="ministral3"))


def qwen2(c: Config) -> Architecture:
    return llama(c, projection_biases=True, max_positions=32_768)


def qwen3(c: Config) -> Architecture:
    return llama(c, query_key_norm=True, max_positions=32_768, head_size=128)


def qwen2_5_vl(c: Config) -> Architecture:
    """The language model of Qwen2.5-VL: a Qwen 2. Its M-RoPE is RoPE where there are no images."""
    return llama(c, 1_000_000.0, projection_biases=True, max_positions=32_768, norm_eps=1e-5)


def qwen3_vl(c: Config) -> Architecture:
    """The language model of Qwen3-VL: a Qwen 3. Its M-RoPE is RoPE where there are no images."""
    return llama(c, 500_000.0, query_key_norm=True, max_positions=128_000, head_size=128)


def phi3(c: Config) -> Architecture:
    """Phi-3 and Phi-4: a Llama whose query, key and value projections are one matrix in the file, as are gate and up."""
    decoder = llama(c, max_positions=4096, norm_eps=1e-5)
    part = rotary_size(c, decoder.head_size, "partial_rotary_factor", 1.0)
    return with_window(c, msgspec.structs.replace(decoder, family="phi3", rotary_size=part))


def granite(c: Config) -> Architecture:
    """Granite 3: a Llama with four multipliers."""
    return llama(
        c,
        attention_scale=c.number("attention_multiplier", 1.0),
        embedding_multiplier=c.number("embedding_multiplier", 1.0),
        residual_multiplier=c.number("residual_multiplier", 1.0),
        logits_scaling=c.number("logits_scaling", 1.0),
    )


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
    window, every = layers_with_window(c, 4)
    return rms_decoder(
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
        window, every = layers_with_window(c, 4)
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
    return rms_decoder(
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
