"""The config.json by which transformers loads exported weights."""

from __future__ import annotations

from typing import Any

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.configs.layernorm import TANH_GELU
from memconsole.plan.models.rotary import longrope_attention_factor

_OWN_TOKENS = (
    "phi3", "smollm3", "ministral3", "olmo2", "olmo3", "olmoe", "mixtral", "exaone4", "ernie4_5", "seed_oss", "glm", "glm4",
)  # fmt: skip
"""Kinds whose default special tokens are those of their own vocabularies."""
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""The transformers class of each model type."""


def config(a: Architecture) -> dict[str, Any]:
    """The Hugging Face config.json of an architecture, in transformers 4 and 5 spelling."""
    if a.family == "gpt2":
        return _described("gpt2", a, **_gpt2(a))
    shape = _shape(a)
    if a.family == "gemma3":
        return _described("gemma3_text", a, **shape, **_gemma3(a))
    rope = _rope_fields(a)
    if a.family == "gpt_neox":
        return _described("gpt_neox", a, **_gpt_neox(a), **rope)
    if a.family == "starcoder2":
        return _described("starcoder2", a, **_starcoder2(a), **rope)
    if a.family == "gemma":
        return _described("gemma", a, **shape, **rope, hidden_activation="gelu_pytorch_tanh")
    if a.family == "gemma2":
        return _described("gemma2", a, **shape, **rope, **_gemma2(a))
    kind, more = _llama_like(a)
    if kind in _OWN_TOKENS:
        more |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return _described(kind, a, **(shape | rope | more), hidden_act="silu")


def _gpt2(a: Architecture) -> dict[str, Any]:
    return {
        "n_positions": a.max_positions,
        "n_embd": a.hidden_size,
        "n_layer": a.layers,
        "n_head": a.heads,
        "n_inner": a.intermediate_size,
        "activation_function": "gelu" if a.activation == "gelu" else "gelu_new",
        "layer_norm_epsilon": a.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _sizes(a: Architecture) -> dict[str, Any]:
    """The sizes of all families but GPT-2 and GPT-NeoX."""
    return {
        "hidden_size": a.hidden_size,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_size,
        "intermediate_size": a.intermediate_size,
        "max_position_embeddings": a.max_positions,
    }


def _shape(a: Architecture) -> dict[str, Any]:
    """What all families with RMSNorm say of their blocks."""
    return {
        **_sizes(a),
        "rms_norm_eps": a.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def _gemma3(a: Architecture) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(a.scale**-2),
        "sliding_window": a.sliding_window,
        "sliding_window_pattern": a.global_every,
        "layer_types": _layer_types(a),
        "rope_theta": a.rope_theta,
        "rope_local_base_freq": a.rope_local_theta,
        "rope_parameters": _by_layer_type(a),
        **({} if a.rope_scaling is None else {"rope_scaling": _rope(a)}),  # for transformers 4
    }


def _gemma2(a: Architecture) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(a.scale**-2),
        "attn_logit_softcapping": a.attention_cap,
        "final_logit_softcapping": a.logit_cap,
        "sliding_window": a.sliding_window,
        "layer_types": _layer_types(a),
    }


def _layer_types(a: Architecture) -> list[str]:
    return ["sliding_attention" if a.is_local(i) else "full_attention" for i in range(a.layers)]


def _llama_like(a: Architecture) -> tuple[str, dict[str, Any]]:
    """The model type of an architecture with Llama's names of weights, and what it has beside shape and rotary positions."""
    if a.attention_scale is not None:
        kind, more = _experts(a) if a.experts else ("granite", {})
        return kind, {
            **more,
            "attention_multiplier": a.attention_scale,
            "embedding_multiplier": a.embedding_multiplier,
            "residual_multiplier": a.residual_multiplier,
            "logits_scaling": a.logits_scaling,
        }
    if a.experts:
        return _experts(a)
    if a.family == "glm":
        more = {"attention_bias": a.projection_biases, **_rotated_share(a)}
        return "glm4" if a.post_norms else "glm", more
    if a.family == "ernie4_5":
        return "ernie4_5", {"use_bias": False}
    if a.family == "seed_oss":
        more = {"attention_bias": a.projection_biases, "attention_out_bias": False}
        return "seed_oss", more | {"residual_dropout": 0.0}
    windows = {"sliding_window": a.sliding_window, "layer_types": _layer_types(a)}
    if _is_olmo3(a):
        return "olmo3", windows
    if not a.pre_norms:
        return ("olmo2", {}) if a.joint_query_key_norm else ("exaone4", windows)
    if a.query_key_norm:
        return "qwen3", {}
    if a.projection_biases:
        return "qwen2", {}
    if a.unrotated_every:
        rotated = [int(a.is_rotated(layer)) for layer in range(a.layers)]
        return "smollm3", {"no_rope_layers": rotated}
    if a.family == "phi3":
        return "phi3", {"sliding_window": a.sliding_window, **_phi3(a)}
    if a.family == "ministral3":
        return "ministral3", {"sliding_window": a.sliding_window}
    if a.sliding_window is not None:
        return "mistral", {"sliding_window": a.sliding_window}
    return "llama", {}


def _is_olmo3(a: Architecture) -> bool:
    """Whether it is OLMo 3: OLMo 2 with sliding windows."""
    alike = a.attention_scale is None and not a.experts and a.joint_query_key_norm
    return alike and not a.pre_norms and a.sliding_window is not None


def _experts(a: Architecture) -> tuple[str, dict[str, Any]]:
    """The model type of a mixture of experts, and what it says of them."""
    more = {"num_experts_per_tok": a.experts_per_token, "router_aux_loss_coef": 0.0}
    if a.family in ("mixtral", "granite_moe"):
        more["num_local_experts"] = a.experts
        if a.family == "granite_moe":
            return "granitemoe", more
        return "mixtral", {**more, "sliding_window": a.sliding_window}
    more |= {"num_experts": a.experts, "norm_topk_prob": a.normalized_shares}
    if a.joint_query_key_norm:
        return "olmoe", {**more, "clip_qkv": None}
    inner = {"moe_intermediate_size": a.intermediate_size, "decoder_sparse_step": 1}
    return "qwen3_moe", {**more, **inner, "mlp_only_layers": [], "use_sliding_window": False}


def _gpt_neox(a: Architecture) -> dict[str, Any]:
    """What GPT-NeoX says of its shape, and its own names for its rotary positions."""
    return {
        "hidden_size": a.hidden_size,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "intermediate_size": a.intermediate_size,
        "max_position_embeddings": a.max_positions,
        "hidden_act": "gelu" if a.activation == "gelu" else "gelu_new",
        "layer_norm_eps": a.norm_eps,
        "use_parallel_residual": a.parallel_residual,
        "attention_bias": True,
        "rotary_pct": a.rotated_size / a.head_size,
        "rotary_emb_base": a.rope_theta,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _starcoder2(a: Architecture) -> dict[str, Any]:
    return {
        **_sizes(a),
        "hidden_act": "gelu" if a.activation == "gelu" else TANH_GELU[1],
        "norm_epsilon": a.norm_eps,
        "use_bias": True,
        "sliding_window": a.sliding_window,
        **dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _phi3(a: Architecture) -> dict[str, Any]:
    """What Phi-3 says of its rotary positions beside their scaling."""
    scaling = a.rope_scaling
    original = a.max_positions if scaling is None else scaling.original_positions
    return {**_rotated_share(a), "original_max_position_embeddings": original}


def _rotated_share(a: Architecture) -> dict[str, Any]:
    return {"partial_rotary_factor": a.rotated_size / a.head_size}


def _described(kind: str, a: Architecture, **rest: Any) -> dict[str, Any]:
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": a.vocab_size,
        "tie_word_embeddings": a.tied_embeddings,
        "initializer_range": a.initializer_range,
        **rest,
    }


def _by_layer_type(a: Architecture) -> dict[str, Any]:
    """The rotary positions of each kind of layer, as transformers 5 writes them."""
    return {
        "full_attention": {**_rope(a), "rope_theta": a.rope_theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": a.rope_local_theta},
    }


def _rope_fields(a: Architecture) -> dict[str, Any]:
    """The rotary positions, as transformers 5 spells them (`rope_parameters`) and as transformers 4 does."""
    parameters = {**_rope(a), "rope_theta": a.rope_theta}
    if a.family in ("phi3", "glm", "gpt_neox"):
        parameters |= _rotated_share(a)
    if _is_olmo3(a):
        parameters = _by_layer_type(a)
    fields: dict[str, Any] = {"rope_theta": a.rope_theta, "rope_parameters": parameters}
    if a.rope_scaling is not None:
        fields["rope_scaling"] = _rope(a)
    return fields


def _rope(a: Architecture) -> dict[str, Any]:
    """The kind of the rotary positions, and their scaling."""
    s = a.rope_scaling
    if s is None:
        return {"rope_type": "default"}
    if s.kind == "linear":
        return {"rope_type": "linear", "factor": s.factor}
    original = {"original_max_position_embeddings": s.original_positions}
    if s.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            **original,
        }
    if s.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": s.factor,
            "beta_fast": s.beta_fast,
            "beta_slow": s.beta_slow,
            "truncate": s.truncate,
            "attention_factor": s.attention_factor,
            **({"llama_4_scaling_beta": s.query_beta} if a.family == "ministral3" else {}),
            **original,
        }
    factors = {"short_factor": list(s.short_factors), "long_factor": list(s.long_factors)}
    usual = longrope_attention_factor(a.max_positions / s.original_positions, s.original_positions)
    if a.family == "phi3" and s.attention_factor == usual:
        return {"type": "longrope", **factors}  # transformers 4 allows Phi-3 no more keys
    return {
        "rope_type": "longrope",
        "factor": s.factor,
        "attention_factor": s.attention_factor,
        **factors,
        **original,
    }
