"""Converts a Hugging Face config.json to an `Architecture`; unsupported features are refused by name.

Reads both spellings in use: transformers 4 (`rope_theta`, `rope_scaling`, `sliding_window_pattern`) and
transformers 5 (`rope_parameters`, `layer_types`). Defaults for keys a file leaves out are those of
transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from memconsole import regular_file
from memconsole.once_per_version import once_per_version
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.config_reader import Config, refusal
from memconsole.plan.models.layernorm_families import TANH_GELU, gpt2, gpt_neox
from memconsole.plan.models.rotary_config import rope, rotary_size
from memconsole.plan.plan import PlanError, quote

CONFIG_BYTES = 16 << 20
"""A larger file is no config.json."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "no_rope_layers": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "reorder_and_upcast_attn": (False, None),
    "use_sliding_window": (False, None),
    "router_jitter_noise": (0, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "clip_qkv": (None,),
    "shared_expert_intermediate_size": (0, None),
    "n_shared_experts": (0, None),
    "qkv_bias": (False, None),
    "use_qk_norm": (True, None),
}
"""Keys that change the computation, with the only values the decoder implements."""
_IMPLEMENTED = {
    "gemma2": ("final_logit_softcapping", "attn_logit_softcapping"),
    "gpt_neox": ("attention_bias", "partial_rotary_factor"),
    **dict.fromkeys(
        ("mixtral", "olmoe", "qwen3_moe", "granitemoe"), ("num_experts", "num_local_experts")
    ),
    "phi3": ("partial_rotary_factor",),
    "smollm3": ("no_rope_layers",),
}
"""Of these keys, those whose other values are implemented for a model type."""
_WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "mistral3": {},
}
"""Model types that also see images, with the sizes that their files may leave out. Their language model is read."""


def architecture_from_config(config: Mapping[str, Any], where: str) -> Architecture:
    """The decoder a config.json describes; `where` names the file in errors.

    Raises `PlanError` for an unknown model_type, a missing or impossible value, and for every
    feature the decoder does not implement.
    """
    read = Config(config, where)
    model_type = read.text("model_type", "")
    if model_type in _WITH_IMAGES:
        return architecture_from_config(_language_model(read, model_type, config), where)
    make = _FAMILIES.get(model_type)
    if make is None:
        known = ", ".join(sorted([*_FAMILIES, *_WITH_IMAGES]))
        raise refusal(where, "model_type", model_type or None, f"one of {known}")
    for key, allowed in _PLAIN.items():
        value = config.get(key)
        if value not in allowed and key not in _IMPLEMENTED.get(model_type, ()):
            raise refusal(where, key, value, f"{quote(allowed[0])}: anything else is not supported")
    made = make(read)
    if made.heads % made.kv_heads:
        raise refusal(
            where, "num_key_value_heads", made.kv_heads, f"a divisor of {made.heads} heads"
        )
    if made.positions == "rope" and made.head_size % 2:
        raise refusal(where, "head_dim", made.head_size, "an even number")
    _check_factors(made, where)
    return made


def _check_factors(made: Architecture, where: str) -> None:
    """LongRoPE has one factor for each pair of elements that rotates. Raises `PlanError`."""
    scaling, pairs = made.rope_scaling, made.rotated_size // 2
    if scaling is None or scaling.kind != "longrope":
        return
    factors = {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
    for key, found in factors.items():
        if len(found) != pairs:
            raise refusal(where, key, f"{len(found)} numbers", f"{pairs}, one for each pair")


def _language_model(c: Config, model_type: str, outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model. Raises `PlanError`."""
    found = c.table("text_config")
    kind = Config(found, c.where).text("model_type", "")
    if kind not in _FAMILIES:
        expected = "that of a language model: " + ", ".join(sorted(_FAMILIES))
        raise refusal(c.where, "text_config.model_type", kind or None, expected)
    said = (
        "tie_word_embeddings",
        "quantization_config",
    )  # transformers reads these from the outer table
    outside = {key: outer[key] for key in said if outer.get(key) is not None}
    return {**_WITH_IMAGES[model_type], **found, **outside}


def read_architecture(directory: str) -> Architecture:
    """The decoder of a directory's config.json, read again only when it changes. Raises `PlanError`."""
    path = Path(directory, "config.json")
    try:
        return _read(path)
    except PlanError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PlanError(
            f"model.name = {quote(directory)}: config.json cannot be read: {quote(reason)}",
            "model.name",
        ) from None


@once_per_version(64)
def _read(path: Path) -> Architecture:
    config = msgspec.json.decode(regular_file.read(path, CONFIG_BYTES))
    if not isinstance(config, dict):
        raise ValueError("not a JSON object")
    return architecture_from_config(config, str(path))


def _rotary(
    c: Config,
    head_size: int | None = None,
    max_positions: int = 2048,
    norm_eps: float = 1e-6,
    tied_embeddings: bool = False,
    intermediate_size: int | None = None,
    **rest: Any,
) -> Architecture:
    """What Llama, Qwen3 and all Gemmas have in common; the named arguments are class defaults."""
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


def _llama(c: Config, default_theta: float = 10_000.0, **differences: Any) -> Architecture:
    c.only("hidden_act", "silu", ("silu",))
    for kind in c.layer_types():
        if kind != "full_attention":
            raise refusal(c.where, "layer_types", kind, "full_attention")
    theta, scaling = rope(c, "full_attention", default_theta)
    return _rotary(c, family="llama", rope_theta=theta, rope_scaling=scaling, **differences)


def _mistral(c: Config) -> Architecture:
    return _windowed(c, _llama(c, max_positions=131_072))


def _phi3(c: Config) -> Architecture:
    """Phi-3 and Phi-4: a Llama whose query, key and value projections are one matrix in the file, as are gate and up."""
    made = _llama(c, max_positions=4096)
    part = rotary_size(c, made.head_size, "partial_rotary_factor", 1.0)
    return _windowed(c, msgspec.structs.replace(made, family="phi3", rotary_size=part))


def _granite(c: Config) -> Architecture:
    """Granite 3: a Llama with four multipliers."""
    return _llama(
        c,
        attention_scale=c.number("attention_multiplier", 1.0),
        embedding_multiplier=c.number("embedding_multiplier", 1.0),
        residual_multiplier=c.number("residual_multiplier", 1.0),
        logits_scaling=c.number("logits_scaling", 1.0),
    )


def _olmo2(c: Config) -> Architecture:
    """OLMo 2: a Llama with norms after attention and the MLP instead of before, and norms of all queries and all keys."""
    return _llama(
        c,
        query_key_norm=True,
        joint_query_key_norm=True,
        pre_norms=False,
        post_norms=True,
        norm_eps=1e-5,
    )


def _smollm3(c: Config) -> Architecture:
    """SmolLM3: a Llama in which some layers do not rotate queries and keys (NoPE)."""
    made = _llama(c, max_positions=32_768, tied_embeddings=True, default_theta=2_000_000.0)
    every = c.size("no_rope_layer_interval", 4)
    rotates = c.flags("no_rope_layers")[: made.layers]
    if rotates:
        every = rotates.index(False) + 1 if False in rotates else 0
        expected = [not every or (layer + 1) % every != 0 for layer in range(made.layers)]
        if rotates != expected:
            raise refusal(
                c.where, "no_rope_layers", rotates, f"{made.layers} entries, with 0 for every n-th"
            )
    return msgspec.structs.replace(made, unrotated_every=every)


def _mixtral(c: Config) -> Architecture:
    """Mixtral: a Mistral with experts."""
    made = _llama(c, max_positions=131_072, default_theta=1_000_000.0, norm_eps=1e-5)
    made = msgspec.structs.replace(made, family="mixtral")
    return _windowed(c, _with_experts(c, made, (8, 2), normalized=True))


def _qwen3_moe(c: Config) -> Architecture:
    """Qwen3 MoE: a Qwen3 with experts in every layer."""
    inner = c.size("moe_intermediate_size", 768)
    made = _llama(c, query_key_norm=True, max_positions=32_768, intermediate_size=inner)
    return _with_experts(c, made, (128, 8), normalized=c.flag("norm_topk_prob", False))


def _olmoe(c: Config) -> Architecture:
    """OLMoE: a Llama with experts, and norms of all queries and all keys."""
    made = _llama(
        c, query_key_norm=True, joint_query_key_norm=True, max_positions=4096, norm_eps=1e-5
    )
    return _with_experts(c, made, (64, 8), normalized=c.flag("norm_topk_prob", False))


def _granite_moe(c: Config) -> Architecture:
    """Granite 3 MoE: a Granite with experts."""
    made = msgspec.structs.replace(_granite(c), family="granite_moe")
    return _with_experts(c, made, (8, 2), normalized=True)


def _with_experts(
    c: Config, made: Architecture, usual: tuple[int, int], *, normalized: bool
) -> Architecture:
    """`made` with experts in every block. `usual`: how many there are, and how many of them a token goes to, if the file
    does not say. Raises `PlanError`."""
    count = c.size("num_experts", c.size("num_local_experts", usual[0]))
    picked = c.size("num_experts_per_tok", usual[1])
    if picked > count:
        raise refusal(c.where, "num_experts_per_tok", picked, f"at most the {count} experts")
    return msgspec.structs.replace(
        made, experts=count, experts_per_token=picked, normalized_shares=normalized
    )


def _windowed(c: Config, made: Architecture) -> Architecture:
    """With a sliding window in every layer, if the file names one that is shorter than the model's rows."""
    window = c.size("sliding_window", made.max_positions)
    if window >= made.max_positions:
        return made
    if made.rope_scaling is not None:
        raise refusal(
            c.where, "rope_scaling", made.rope_scaling.kind, "none beside a sliding window"
        )
    return msgspec.structs.replace(
        made, sliding_window=window, global_every=made.layers + 1, rope_local_theta=made.rope_theta
    )


def _qwen2(c: Config) -> Architecture:
    return _llama(c, projection_biases=True, max_positions=32_768)


def _qwen3(c: Config) -> Architecture:
    return _llama(c, query_key_norm=True, max_positions=32_768, head_size=128)


def _gemma(c: Config) -> Architecture:
    # Files from before transformers 4.39 say "gelu", but the model was trained with the tanh approximation.
    if c.missing("hidden_activation"):
        c.only("hidden_act", TANH_GELU[1], (*TANH_GELU, "gelu"))
    else:
        c.only("hidden_activation", None, TANH_GELU)
    theta, scaling = rope(c, "full_attention", 10_000.0)
    return _rotary(
        c,
        family="gemma",
        activation="gelu_tanh",
        norm_unit_offset=True,
        scale_embeddings=True,
        rope_theta=theta,
        rope_scaling=scaling,
        head_size=256,
        max_positions=8192,
        tied_embeddings=True,
    )


def _gemma2(c: Config) -> Architecture:
    c.only("hidden_activation", TANH_GELU[1], TANH_GELU)
    theta, scaling = rope(c, "full_attention", 10_000.0)
    if scaling is not None:
        raise refusal(c.where, "rope_scaling", scaling.kind, "none beside a sliding window")
    window, every = _window(c, 2)
    return _rotary(
        c,
        family="gemma2",
        activation="gelu_tanh",
        norm_unit_offset=True,
        scale_embeddings=True,
        post_norms=True,
        attention_scale=c.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_cap=_cap(c, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(c, "final_logit_softcapping", 30.0),
        rope_theta=theta,
        rope_local_theta=theta,
        sliding_window=window,
        global_every=every,
        head_size=256,
        max_positions=8192,
        tied_embeddings=True,
    )


def _cap(c: Config, key: str, default: float) -> float | None:
    """A cap of scores or logits; null is none."""
    return None if c.says_none(key) else c.number(key, default)


def _gemma3(c: Config) -> Architecture:
    c.only("hidden_activation", TANH_GELU[1], TANH_GELU)
    theta, scaling = rope(c, "full_attention", 1_000_000.0)
    local_theta, local_scaling = rope(c, "sliding_attention", 10_000.0)
    if local_scaling is not None:
        raise refusal(c.where, "rope_parameters", local_scaling.kind, "no scaling of local layers")
    window, every = _window(c, 6)
    return _rotary(
        c,
        family="gemma3",
        activation="gelu_tanh",
        norm_unit_offset=True,
        scale_embeddings=True,
        query_key_norm=True,
        post_norms=True,
        attention_scale=c.number("query_pre_attn_scalar", 256.0) ** -0.5,
        rope_theta=theta,
        rope_local_theta=local_theta,
        rope_scaling=scaling,
        sliding_window=window,
        global_every=every,
        head_size=256,
        max_positions=131_072,
        tied_embeddings=True,
    )


def _window(c: Config, usual: int) -> tuple[int | None, int]:
    """(sliding_window, global_every) of Gemma 2 and 3; (None, 1) if every layer is global."""
    every = c.size("sliding_window_pattern", c.size("_sliding_window_pattern", usual))
    layers = c.size("num_hidden_layers")
    kinds = c.layer_types()
    if kinds:
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


_FAMILIES = {
    "gpt2": gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "olmo2": _olmo2,
    "gpt_neox": gpt_neox,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
