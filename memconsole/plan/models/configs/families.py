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
from memconsole.plan.models.configs.experts import granite_moe, mixtral, olmoe, qwen3_moe
from memconsole.plan.models.configs.gemma import gemma, gemma2, gemma3
from memconsole.plan.models.configs.layernorm import gpt2, gpt_neox, starcoder2
from memconsole.plan.models.configs.llama import (
    ernie4_5,
    exaone4,
    glm,
    glm4,
    granite,
    llama,
    ministral3,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_vl,
    seed_oss,
    smollm3,
)
from memconsole.plan.models.configs.reader import Config, refusal
from memconsole.plan.plan import PlanError, quote

CONFIG_BYTES = 16 << 20
"""A larger file is no config.json."""
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_out_bias": (False, None),
    "mlp_bias": (False, None),
    "use_bias": (False, None),
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
    **dict.fromkeys(("glm", "glm4", "gpt_neox"), ("attention_bias", "partial_rotary_factor")),
    "seed_oss": ("attention_bias",),
    "starcoder2": ("use_bias",),
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
    "qwen2_5_vl": {},
    "qwen3_vl": {},
}
"""Model types that also see images, with the sizes that their files may leave out. Their language model is read."""
_FAMILIES = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "ministral3": ministral3,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_5_vl_text": qwen2_5_vl,
    "qwen3": qwen3,
    "qwen3_vl_text": qwen3_vl,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "smollm3": smollm3,
    "granite": granite,
    "granitemoe": granite_moe,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "exaone4": exaone4,
    "ernie4_5": ernie4_5,
    "seed_oss": seed_oss,
    "glm": glm,
    "glm4": glm4,
    "gpt_neox": gpt_neox,
    "starcoder2": starcoder2,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
}
"""The function that reads each model type."""


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
    for key, allowed in _SUPPORTED_VALUES.items():
        value = config.get(key)
        if value not in allowed and key not in _IMPLEMENTED.get(model_type, ()):
            raise refusal(where, key, value, f"{quote(allowed[0])}: anything else is not supported")
    decoder = make(read)
    if decoder.heads % decoder.kv_heads:
        raise refusal(
            where, "num_key_value_heads", decoder.kv_heads, f"a divisor of {decoder.heads} heads"
        )
    if decoder.positions == "rope" and decoder.head_size % 2:
        raise refusal(where, "head_dim", decoder.head_size, "an even number")
    _check_factors(decoder, where)
    return decoder


def _check_factors(decoder: Architecture, where: str) -> None:
    """Raise `PlanError` unless LongRoPE has one factor for each pair of elements that is rotated."""
    scaling, pairs = decoder.rope_scaling, decoder.rotated_size // 2
    if scaling is None or scaling.kind != "longrope":
        return
    factors = {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
    for key, values in factors.items():
        if len(values) != pairs:
            raise refusal(where, key, f"{len(values)} numbers", f"{pairs}, one for each pair")


def _language_model(c: Config, model_type: str, outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model. Raises `PlanError`."""
    text_config = c.table("text_config")
    if not text_config and model_type == "qwen2_5_vl":  # its older files have one table
        text_config = {**outer, "model_type": "qwen2_5_vl_text"}
    kind = Config(text_config, c.where).text("model_type", "")
    if kind not in _FAMILIES:
        expected = "that of a language model: " + ", ".join(sorted(_FAMILIES))
        raise refusal(c.where, "text_config.model_type", kind or None, expected)
    # transformers reads these from the outer table.
    outer_keys = ("tie_word_embeddings", "quantization_config")
    outside = {key: outer[key] for key in outer_keys if outer.get(key) is not None}
    if model_type == "qwen2_5_vl" and text_config.get("tie_word_embeddings"):
        outside["tie_word_embeddings"] = True  # false may be the default of the outer table
    return {**_WITH_IMAGES[model_type], **text_config, **outside}


def sees_images(directory: str) -> bool:
    """Whether a directory's model also sees images, so that its language model is a part of another one."""
    try:
        config = msgspec.json.decode(
            regular_file.read(Path(directory, "config.json"), CONFIG_BYTES)
        )
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("model_type") in _WITH_IMAGES


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
